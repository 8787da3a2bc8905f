// A torch backend for tests, whose copies and compute are late: they run when somebody waits for them.
#include <ATen/EmptyTensor.h>
#include <ATen/core/op_registration/op_registration.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <torch/library.h>

#include "autocast.h"
#include "operators.h"

namespace late {
namespace {

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// ---- making tensors ----

c10::DispatchKeySet keys() { return c10::DispatchKeySet(c10::DispatchKey::PrivateUse1); }

at::Tensor empty(c10::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
    const c10::DeviceGuard guard(c10::device_or_default(device));
    return at::detail::empty_generic(sizes, &DeviceMemory::instance(), keys(), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
    const c10::DeviceGuard guard(c10::device_or_default(device));
    const auto type = c10::dtype_or_default(dtype);
    return at::detail::empty_strided_generic(sizes, strides, &DeviceMemory::instance(), keys(), type);
}

std::vector<int64_t> contiguous_strides(c10::IntArrayRef sizes) {
    std::vector<int64_t> strides(sizes.size());
    int64_t stride = 1;
    for (size_t i = sizes.size(); i-- > 0; stride *= std::max<int64_t>(sizes[i], 1)) strides[i] = stride;
    return strides;
}

const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef sizes, std::optional<at::MemoryFormat>) {
    const c10::DeviceGuard guard(self.device());
    resize_tensor(self, sizes, contiguous_strides(sizes));
    return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef sizes,
                        c10::IntArrayRef strides) {
    auto* const impl = self.unsafeGetTensorImpl();
    impl->set_storage_keep_dtype(std::move(source));
    const bool given = strides.size() == sizes.size();
    impl->set_sizes_and_strides(sizes, given ? strides : c10::IntArrayRef(contiguous_strides(sizes)), offset);
    return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
    const auto elements = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
    return set_storage(self, std::move(source), 0, {elements}, {1});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
    return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

// ---- copies ----

HostRange range_of(const at::Tensor& tensor) {
    int64_t elements = 1;
    for (int64_t i = 0; i < tensor.dim(); ++i) elements += (tensor.size(i) - 1) * tensor.stride(i);
    const auto begin = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
    return {begin, begin + static_cast<uintptr_t>(elements) * tensor.dtype().itemsize()};
}

void fill_with_poison(const at::Tensor& tensor) {
    std::vector<int64_t> sizes = tensor.sizes().vec(), strides = tensor.strides().vec();
    const auto width = static_cast<int64_t>(tensor.dtype().itemsize());
    for (auto& stride : strides) stride *= width;
    sizes.push_back(width);
    strides.push_back(1);
    auto bytes = over(unowned(tensor.storage()), caffe2::TypeMeta::Make<uint8_t>(), sizes, strides,
                      tensor.storage_offset() * width);
    bytes.fill_(poison);
}

TaskPtr queue_copy(int device, at::Tensor to, at::Tensor from, HostRange host = {}, TaskPtr after = nullptr) {
    auto work = [to = std::move(to), from = std::move(from)] {
        const KernelState state;
        to.copy_(from);
    };
    return Scheduler::instance().enqueue(current_stream(device), Kind::copy, std::move(work), {std::move(after)}, host);
}

void copy_on_device(const at::Tensor& from, const at::Tensor& to) {
    Twins twins(Memory::shared);
    auto& scheduler = Scheduler::instance();
    const int source = from.device().index(), destination = to.device().index();
    if (source == destination) {
        queue_copy(source, twins.of(to), twins.of(from));
        return;
    }
    const auto reached = scheduler.newest(current_stream(destination));
    const auto copied = queue_copy(source, twins.of(to), twins.of(from), {}, reached);
    scheduler.enqueue(current_stream(destination), Kind::mark, nullptr, {copied});
}

void copy_to_device(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
    const bool direct = non_blocking && PinnedMemory::instance().contains(from.const_data_ptr());
    const auto source = direct ? over(unowned(from.storage()), from) : from.clone();  // what is not pinned is staged
    const auto copied =
        queue_copy(to.device().index(), Twins(Memory::shared).of(to), source, direct ? range_of(from) : HostRange{});
    if (!non_blocking) Scheduler::instance().wait({copied});
}

void copy_to_host(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
    auto& scheduler = Scheduler::instance();
    const bool direct = non_blocking && PinnedMemory::instance().contains(to.const_data_ptr());
    const auto range = range_of(to);
    // Copies that are queued before may still use that memory, in the order of their stream.
    if (direct && !scheduler.touches_host(range)) fill_with_poison(to);
    const auto target = over(unowned(to.storage()), to), source = Twins(Memory::shared).of(from);
    const auto copied = queue_copy(from.device().index(), target, source, range);
    if (!direct) scheduler.wait({copied});
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
    if (dst.numel() == 0) return dst;
    const KernelState state;
    if (is_late(self) && is_late(dst)) {
        copy_on_device(self, dst);
    } else if (is_late(dst)) {
        copy_to_device(self, dst, non_blocking);
    } else {
        copy_to_host(self, dst, non_blocking);
    }
    return dst;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& dst) {
    dst.resize_(self.sizes());
    return copy_from(self, dst, false);
}

void record_stream(at::Tensor& self, c10::Stream stream) {
    DeviceMemory::instance().record(self.storage().data_ptr(), key_of(stream));
}

// `param.data = tensor` across devices, as between the CPU and CUDA.
bool has_compatible_shallow_copy_type(const at::Tensor&, const at::Tensor& from) {
    return is_late(from) || from.is_cpu();
}

// ---- attention: the CPU's choice of kernel ----

int64_t choose_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                         const std::optional<at::Tensor>& mask, double dropout, bool causal,
                         std::optional<double> scale, bool grouped) {
    const KernelState state;
    Twins twins(Memory::shared);
    const auto mask_twin = mask ? std::optional(twins.of(*mask)) : mask;
    return at::_fused_sdp_choice(twins.of(query), twins.of(key), twins.of(value), mask_twin, dropout, causal, scale,
                                 grouped);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
    library.impl("empty.memory_format", &empty);
    library.impl("empty_strided", &empty_strided);
    library.impl("resize_", &resize_);
    library.impl("set_.source_Storage_storage_offset", &set_storage);
    library.impl("set_.source_Storage", &set_whole_storage);
    library.impl("set_.source_Tensor", &set_tensor);
    library.impl("_copy_from", &copy_from);
    library.impl("_copy_from_and_resize", &copy_from_and_resize);
    library.impl("record_stream", &record_stream);
    library.impl("_has_compatible_shallow_copy_type", &has_compatible_shallow_copy_type);
    library.impl("_fused_sdp_choice", &choose_attention);
}

// Compositions that branch on the type of the device: the CPU's branch.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
    for (const char* name : {"convolution", "convolution_backward"}) {
        library.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
    }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
    library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// Uses the CPU's kernel also where other devices use a composition of operators, so that results are the CPU's.
void register_kernels() {
    auto& dispatcher = c10::Dispatcher::singleton();
    auto* const kept = new std::vector<c10::RegistrationHandleRAII>;
    for (const auto& name : dispatcher.getAllOpNamesForDispatchKey(c10::DispatchKey::CPU)) {
        const auto op = dispatcher.findOp(name);
        if (!op || !std::string_view(name.name).starts_with("aten::")) continue;
        if (op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) continue;
        kept->push_back(dispatcher.registerImpl(name, c10::DispatchKey::PrivateUse1,
                                                c10::KernelFunction::makeFromBoxedFunction<&fallback>(), std::nullopt,
                                                nullptr, "tests/late"));
    }
}

}  // namespace
}  // namespace late

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &late::choose_attention)
}

// ---- for ctypes ----

#pragma GCC visibility push(default)
extern "C" {

void late_register() {
    c10::SetAllocator(c10::kPrivateUse1, &late::DeviceMemory::instance());
    at::RegisterPrivateUse1HooksInterface(new late::Hooks);
    late::register_kernels();
}

void late_set_seed(uint64_t seed) { late::Scheduler::instance().set_seed(seed); }
void late_set_mode(int mode) { late::Scheduler::instance().set_mode(static_cast<late::Mode>(mode)); }
void late_set_limit(int device, uint64_t nbytes) {
    late::DeviceMemory::instance().set_limit(static_cast<c10::DeviceIndex>(device), nbytes);
}
int64_t late_pending() { return late::Scheduler::instance().pending(); }
void late_counters(late::Counters* counters) { *counters = late::Scheduler::instance().counted(); }

// The text is valid until the next call.
const char* late_at_once() {
    static std::string text;
    text = late::Scheduler::instance().at_once();
    return text.c_str();
}

void late_pin(void* memory, size_t nbytes) { late::PinnedMemory::instance().add(memory, nbytes); }

// Returns 1 if a queued copy uses the memory, which is an error of the caller's; 2 if it was not pinned.
int late_unpin(void* memory) {
    const auto begin = reinterpret_cast<uintptr_t>(memory);
    const size_t nbytes = late::PinnedMemory::instance().remove(memory);
    if (nbytes == 0) return 2;
    return late::Scheduler::instance().touches_host({begin, begin + nbytes}) ? 1 : 0;
}
}
#pragma GCC visibility pop
