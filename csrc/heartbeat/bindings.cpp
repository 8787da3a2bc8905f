// Python bindings of infinity.native._heartbeat. Documented in infinity/native/_heartbeat.pyi.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <cmath>
#include <stdexcept>
#include <vector>

namespace py = pybind11;

namespace {

// An empty line: messages are lines, and a heartbeat may come between two of them.
constexpr char kBeat = '\n';

void beat(const std::vector<int>& sockets, double period, int stop) {
    if (!(period > 0 && period <= 3600)) throw std::invalid_argument("period must be above 0 and at most 3600 seconds");
    const int milliseconds = static_cast<int>(std::ceil(1000 * period));
    const py::gil_scoped_release release;
    for (;;) {
        // Errors are the receiver's to find: no heartbeat arrives.
        for (const int socket : sockets) (void)!send(socket, &kBeat, 1, MSG_DONTWAIT | MSG_NOSIGNAL);
        pollfd end{stop, POLLIN, 0};
        const int ready = poll(&end, 1, milliseconds);
        if (ready > 0 || (ready < 0 && errno != EINTR)) return;
    }
}

}  // namespace

PYBIND11_MODULE(_heartbeat, module) {
    module.doc() = "Signs of life to other ranks, sent without the GIL.";
    module.def("beat", &beat, py::arg("sockets"), py::arg("period"), py::arg("stop"));
}
