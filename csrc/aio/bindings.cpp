// Python bindings of infinity.native._aio. Documented in infinity/native/_aio.pyi.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <system_error>

#include "checksum.h"
#include "engine.h"
#include "faulty_queue.h"

namespace py = pybind11;

namespace infinity::aio {
namespace {

// Releases the GIL, since the destructor waits for requests in flight.
struct WithoutGil {
    void operator()(Engine* engine) const {
        const py::gil_scoped_release release;
        delete engine;
    }
};

using Seconds = std::chrono::duration<double>;

std::string fs_encode(const py::str& path) {
    const auto bytes = py::reinterpret_steal<py::bytes>(PyUnicode_EncodeFSDefault(path.ptr()));
    if (!bytes) throw py::error_already_set();
    return bytes;
}

py::str fs_decode(const std::string& path) {
    auto text = py::reinterpret_steal<py::str>(
        PyUnicode_DecodeFSDefaultAndSize(path.data(), static_cast<Py_ssize_t>(path.size())));
    if (!text) throw py::error_already_set();
    return text;
}

[[noreturn]] void raise_os_error(int error, const std::string& what, const py::object& path) {
    const py::object os_error = py::reinterpret_borrow<py::object>(PyExc_OSError);
    const py::object raised = os_error(error, what, path);  // picks the subclass for the errno
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(raised.ptr())), raised.ptr());
    throw py::error_already_set();
}

// Sleeps without the GIL, in slices, between which signal handlers (Ctrl-C) run: a signal does not interrupt the wait.
uint64_t wait(Request& request, std::optional<double> timeout) {
    if (!request.done() && getpid() != request.owner) {
        throw std::logic_error("this request belongs to the process that started it, not to its forked children");
    }
    const auto start = std::chrono::steady_clock::now();
    while (!request.done()) {
        Seconds left(0.25);
        if (timeout) left = std::min<Seconds>(left, Seconds(*timeout) - (std::chrono::steady_clock::now() - start));
        bool done = false;
        {
            const py::gil_scoped_release release;
            done = request.wait_for(left);
        }
        if (done) break;
        if (PyErr_CheckSignals() != 0) throw py::error_already_set();
        if (timeout && std::chrono::steady_clock::now() - start >= Seconds(*timeout)) {
            const std::string what = Request::describe(request.direction, request.nbytes, request.offset) + " of " +
                                     request.file->path() + " is still under way after " + std::to_string(*timeout) +
                                     " s";
            PyErr_SetObject(PyExc_TimeoutError, fs_decode(what).ptr());
            throw py::error_already_set();
        }
    }
    if (const auto failure = request.failure()) {
        raise_os_error(failure->error, failure->what, fs_decode(failure->path));
    }
    return request.bytes_done();
}

std::unique_ptr<Engine, WithoutGil> make_engine(int64_t block_size, int64_t queue_depth, int64_t threads,
                                                const std::string& backend) {
    try {
        return std::unique_ptr<Engine, WithoutGil>(
            new Engine(Options{block_size, queue_depth, threads}, find_backend(backend)));
    } catch (const std::system_error& error) {
        raise_os_error(error.code().value(), error.what(), py::none());
    }
}

template <typename T>
T get(const py::dict& fault, const char* key, T otherwise) {
    return fault.contains(key) ? fault[key].cast<T>() : otherwise;
}

Fault fault_of(const py::dict& from) {
    Fault fault;
    fault.where = get<std::string>(from, "where", "");
    fault.error = get(from, "error", fault.error);
    fault.accept = get(from, "accept", fault.accept);
    fault.bytes = get(from, "bytes", fault.bytes);
    fault.hold = get(from, "hold", fault.hold);
    fault.flip = get(from, "flip", fault.flip);
    fault.signal = get(from, "signal", fault.signal);
    fault.milliseconds = get(from, "milliseconds", fault.milliseconds);
    fault.above = get(from, "above", fault.above);
    fault.after = get(from, "after", fault.after);
    fault.times = get(from, "times", fault.times);
    const auto only = get<std::string>(from, "only", "");
    if (only == "read") fault.only = Direction::kRead;
    if (only == "write") fault.only = Direction::kWrite;
    return fault;
}

}  // namespace

PYBIND11_MODULE(_aio, m) {
    m.doc() = "Asynchronous file I/O on Linux AIO or io_uring.";

    py::class_<File, std::shared_ptr<File>>(m, "File")
        .def(py::init([](int direct_fd, int buffered_fd, const py::str& path, int64_t alignment) {
                 return std::make_shared<File>(direct_fd, buffered_fd, fs_encode(path), alignment);
             }),
             py::arg("direct_fd"), py::arg("buffered_fd"), py::arg("path"), py::arg("alignment") = 4096)
        .def_property_readonly("path", [](const File& file) { return fs_decode(file.path()); })
        .def_static(
            "striped",
            [](const std::vector<std::shared_ptr<File>>& files, int64_t chunk, const std::vector<int64_t>& order) {
                return std::make_shared<File>(files, chunk, order);
            },
            py::arg("files"), py::arg("chunk"), py::arg("order") = std::vector<int64_t>{})
        .def("keep_checksums", &File::keep_checksums, py::arg("nbytes"), py::arg("block"))
        .def_property_readonly("checksums",
                               [](const File& file) {
                                   const auto values =
                                       file.checksums() ? file.checksums()->values() : std::vector<uint32_t>{};
                                   return py::bytes(reinterpret_cast<const char*>(values.data()), 4 * values.size());
                               })
        .def(
            "restore_checksums",
            [](File& file, const py::bytes& packed) {
                const std::string_view bytes = packed;
                std::vector<uint32_t> values(bytes.size() / 4);
                std::memcpy(values.data(), bytes.data(), 4 * values.size());
                if (!file.checksums()) throw std::invalid_argument("the file keeps no checksums");
                file.checksums()->restore(values);
            },
            py::arg("packed"))
        .def_property_readonly("repaired",
                               [](const File& file) { return file.checksums() ? file.checksums()->repaired() : 0; })
        .def_property_readonly("direct", &File::has_direct)
        .def_property_readonly("alignment", &File::alignment);

    py::class_<Request, std::shared_ptr<Request>>(m, "Request")
        .def("wait", &wait, py::arg("timeout") = py::none())
        .def("done", &Request::done)
        .def_property_readonly("mismatch",
                               [](const Request& request) {
                                   const auto failure = request.failure();
                                   return failure && failure->checksum;
                               })
        .def("take_repaired",
             [](Request& request) {
                 py::list blocks;
                 for (const Repaired& block : request.take_repaired()) {
                     blocks.append(py::make_tuple(block.offset, block.bytes, fs_decode(block.path), block.count));
                 }
                 return blocks;
             })
        .def_property_readonly("times",
                               [](const Request& request) {
                                   const auto seconds = [](std::chrono::steady_clock::time_point time) {
                                       return std::chrono::duration<double>(time.time_since_epoch()).count();
                                   };
                                   return py::make_tuple(seconds(request.began),
                                                         request.done()
                                                             ? py::object(py::float_(seconds(request.ended())))
                                                             : py::object(py::none()));
                               })
        .def_readonly("nbytes", &Request::nbytes)
        .def_property_readonly("bytes_done", &Request::bytes_done);

    const auto starts = [](Direction direction) {
        return
            [direction](Engine& engine, std::shared_ptr<File> file, int64_t offset, uint64_t address, int64_t nbytes) {
                return engine.start(direction, std::move(file), offset, address, nbytes);
            };
    };
    py::class_<Engine, std::unique_ptr<Engine, WithoutGil>>(m, "Engine")
        .def(py::init(&make_engine), py::arg("block_size") = 1 << 20, py::arg("queue_depth") = 32,
             py::arg("threads") = 1, py::kw_only(), py::arg("backend") = "")
        // Keeps the GIL: passing a job to an I/O thread takes microseconds, and reacquiring the GIL may take a hundred.
        .def("read", starts(Direction::kRead), py::arg("file"), py::arg("offset"), py::arg("address"),
             py::arg("nbytes"))
        .def("write", starts(Direction::kWrite), py::arg("file"), py::arg("offset"), py::arg("address"),
             py::arg("nbytes"))
        .def("register", &Engine::register_buffer, py::arg("address"), py::arg("nbytes"),
             py::call_guard<py::gil_scoped_release>())
        .def("unregister", &Engine::unregister_buffer, py::arg("address"), py::call_guard<py::gil_scoped_release>())
        .def("take_latencies",
             [](Engine& engine) {
                 auto buckets = engine.counters().latencies.take();
                 for (auto& [time, count] : buckets) time /= 1e6;
                 return buckets;
             })
        .def("close", &Engine::close, py::call_guard<py::gil_scoped_release>())
        .def("__enter__", [](py::object self) { return self; })
        .def("__exit__",
             [](Engine& engine, const py::args&) {
                 const py::gil_scoped_release release;
                 engine.close();
             })
        .def_property_readonly("backend", [](const Engine& engine) { return engine.backend().name; })
        .def_property_readonly("block_size", [](const Engine& engine) { return engine.options().block_size; })
        .def_property_readonly("queue_depth", [](const Engine& engine) { return engine.options().queue_depth; })
        .def_property_readonly("threads", [](const Engine& engine) { return engine.options().threads; })
        .def_property_readonly("bytes_read", [](Engine& engine) { return engine.counters().bytes_read.load(); })
        .def_property_readonly("bytes_written", [](Engine& engine) { return engine.counters().bytes_written.load(); })
        .def_property_readonly("bytes_buffered",
                               [](Engine& engine) { return engine.counters().bytes_buffered.load(); });

    m.attr("LARGEST_BLOCK") = kLargestBlock;
    m.attr("MOST_THREADS") = kMostThreads;

    m.def("backends", [] {
        std::vector<std::string> names;
        for (const Backend& backend : available_backends()) names.emplace_back(backend.name);
        return names;
    });

    const auto sum = [](auto function) {
        return [function](uint64_t address, int64_t nbytes) {
            check_memory(address, nbytes);
            return function(reinterpret_cast<const void*>(address), static_cast<size_t>(nbytes));
        };
    };
    m.def("checksum", sum(&checksum), py::arg("address"), py::arg("nbytes"), py::call_guard<py::gil_scoped_release>());
    m.def("_portable_checksum", sum(&portable_checksum), py::arg("address"), py::arg("nbytes"));
    m.def("_instruction_checksum", sum(&instruction_checksum), py::arg("address"), py::arg("nbytes"));
    m.def("checksum_kind", &checksum_kind);

    m.def(
        "_inject",
        [](const std::vector<py::dict>& dicts) {
            std::vector<Fault> faults;
            for (const py::dict& dict : dicts) faults.push_back(fault_of(dict));
            inject(std::move(faults));
        },
        py::arg("faults"));
    m.def("_release_held", &release_held);
    m.def("_matches", &matches);
}

}  // namespace infinity::aio
