// Operators: each call infers its outputs from meta tensors, and queues the CPU's kernel on the current stream.
#pragma once

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/AutogradState.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <cstdlib>
#include <iostream>
#include <optional>
#include <set>
#include <string_view>

#include "device.h"
#include "inference.h"

namespace late {

// The state in which kernels run, on any thread: below autograd and autocast, without modes of users. To enter it needs
// no lock of Python's, unlike at::ThreadLocalStateGuard, which copies users' hooks.
class KernelState {
  public:
    KernelState()
        : keys_(plain_keys()),
          autograd_(c10::AutogradState::get_tls_state()),
          modes_(Modes::get_state()),
          functions_(Functions::get_disabled_state()) {
        c10::AutogradState::set_tls_state(
            {/*grad=*/false, /*inference=*/false, /*fw_grad=*/true, /*multithreading=*/true});
        Modes::set_state({});
        Functions::set_disabled_state(at::impl::TorchFunctionDisabledState::ALL_DISABLED);
    }
    ~KernelState() {
        Functions::set_disabled_state(functions_);
        Modes::set_state(modes_);
        c10::AutogradState::set_tls_state(autograd_);
    }
    KernelState(const KernelState&) = delete;
    KernelState& operator=(const KernelState&) = delete;

  private:
    using Modes = c10::impl::TorchDispatchModeTLS;
    using Functions = at::impl::PythonTorchFunctionTLS;

    static c10::impl::LocalDispatchKeySet plain_keys() {
        c10::impl::PODLocalDispatchKeySet keys{};
        keys.set_included(c10::default_included_set);
        keys.set_excluded(c10::default_excluded_set | c10::autograd_dispatch_keyset_with_ADInplaceOrView);
        return keys;
    }

    c10::impl::ForceDispatchKeyGuard keys_;  // restored last
    c10::AutogradState autograd_;
    Modes modes_;
    at::impl::TorchFunctionDisabledState functions_;
};

// The same bytes as host memory, which the result does not own.
inline at::Storage unowned(const at::Storage& storage) {
    return {at::Storage::use_byte_size_t(), storage.nbytes(), at::DataPtr(const_cast<void*>(storage.data()), c10::kCPU),
            nullptr, false};
}

inline at::Tensor over(at::Storage storage, caffe2::TypeMeta dtype, c10::IntArrayRef sizes, c10::IntArrayRef strides,
                       int64_t offset) {
    const auto key = storage.device().is_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::Meta;
    auto tensor = at::detail::make_tensor<at::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), dtype);
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
    return tensor;
}

inline at::Tensor over(at::Storage storage, const at::Tensor& tensor) {
    return over(std::move(storage), tensor.dtype(), tensor.sizes(), tensor.strides(), tensor.storage_offset());
}

// On the CPU over the same bytes; on meta; on the CPU over zeros.
enum class Memory { shared, none, zeros };

// Tensors of a call with the same layouts on other memory. They do not use the storages of the device: queued work must
// not count as a user of them. Tensors that alias still do.
class Twins {
  public:
    explicit Twins(Memory memory) : memory_(memory) {}

    c10::Device device() const { return memory_ == Memory::none ? c10::kMeta : c10::kCPU; }

    at::Tensor of(const at::Tensor& tensor) {
        if (!tensor.defined()) return tensor;
        if (memory_ != Memory::none && !is_late(tensor)) return value_of(tensor);
        // Meta kernels take Python's numbers as they are.
        if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) return tensor;
        return over(storage_of(tensor.storage()), tensor);
    }

  private:
    // A host tensor's value now, which Python does not refer to: it is destroyed without Python's lock.
    static at::Tensor value_of(const at::Tensor& tensor) {
        auto value = tensor.clone();
        if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) value.unsafeGetTensorImpl()->set_wrapped_number(true);
        return value;
    }

    at::Storage storage_of(const at::Storage& storage) {
        for (const auto& [known, twin] : storages_) {
            if (known == storage.unsafeGetStorageImpl()) return twin;
        }
        storages_.emplace_back(storage.unsafeGetStorageImpl(), make_storage(storage));
        return storages_.back().second;
    }

    at::Storage make_storage(const at::Storage& storage) const {
        if (memory_ == Memory::shared) return unowned(storage);
        auto* const allocator = c10::GetAllocator(device().type());
        at::Storage made(at::Storage::use_byte_size_t(), storage.nbytes(), allocator, true);
        if (memory_ == Memory::zeros && made.nbytes() > 0) std::memset(made.mutable_data(), 0, made.nbytes());
        return made;
    }

    Memory memory_;
    std::vector<std::pair<const c10::StorageImpl*, at::Storage>> storages_;
};

inline Stack twins_of(const Stack& arguments, Twins& twins) {
    Stack result;
    for (const auto& argument : arguments) {
        result.push_back(argument.isDevice() ? c10::IValue(twins.device()) : map_tensors(argument, [&](const auto& t) {
            return c10::IValue(twins.of(t)).toTensor();
        }));
    }
    return result;
}

// The device of the call's tensors. As on CUDA, host tensors take part only as scalars and indices.
inline c10::Device device_of_call(const c10::OperatorHandle& op, const Stack& arguments) {
    std::optional<c10::Device> device, other;
    for (const auto& argument : arguments) {
        if (argument.isDevice() && !device) device = argument.toDevice();
        map_tensors(argument, [&](const at::Tensor& tensor) {
            if (!tensor.defined()) return tensor;
            if (is_late(tensor)) {
                if (device && *device != tensor.device()) other = tensor.device();
                device = tensor.device();
            } else if (tensor.dim() > 0 && !argument.isOptionalTensorList()) {
                other = tensor.device();
            }
            return tensor;
        });
    }
    TORCH_CHECK(!(device && other), "Expected all tensors to be on the same device, but found at least two devices, ",
                *device, " and ", *other, "! (", op.operator_name(), ")");
    return device && device->has_index() ? *device : device_of(current_device);
}

// Views need no data: the CPU's kernels make them of tensors of any device.
inline bool is_view(const c10::FunctionSchema& schema) {
    return std::any_of(schema.returns().begin(), schema.returns().end(), [](const c10::Argument& returned) {
        return returned.alias_info() != nullptr && !returned.alias_info()->isWrite();
    });
}

// Operators whose result the host needs, or that use the CPU's generator, whose numbers are drawn in order of calls.
inline bool needs_values(const c10::OperatorHandle& op) {
    static constexpr std::string_view without_dropout = "aten::_scaled_dot_product_flash_attention_for_cpu";
    const auto& schema = op.schema();
    if (!std::string_view(schema.name()).starts_with("aten::")) return true;
    const bool random = op.hasTag(at::Tag::nondeterministic_seeded) && schema.name() != without_dropout;
    if (random || op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output)) return true;
    return std::any_of(schema.returns().begin(), schema.returns().end(), [](const c10::Argument& returned) {
        const auto kind = returned.type()->kind();
        const bool list =
            kind == c10::TypeKind::ListType &&
            returned.type()->castRaw<c10::ListType>()->getElementType()->kind() == c10::TypeKind::TensorType;
        return kind != c10::TypeKind::TensorType && !list;
    });
}

// Operators whose meta kernels infer the outputs of CUDA's kernels, which have other dtypes or shapes than the CPU's.
inline bool is_inferred_by_kernel(const c10::OperatorHandle& op) {
    static const std::set<std::string_view> names = {"aten::native_layer_norm", "aten::native_batch_norm",
                                                     "aten::_native_batch_norm_legit", "aten::_embedding_bag",
                                                     "aten::_embedding_bag_forward_only"};
    return names.contains(op.schema().name());
}

inline at::Tensor empty_like_twin(const at::Tensor& twin, c10::Device device) {
    return at::empty_strided(twin.sizes(), twin.strides(), twin.options().device(device));
}

inline void resize_tensor(const at::Tensor& tensor, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
    const auto offset = static_cast<size_t>(tensor.storage_offset());
    const auto needed = at::detail::computeStorageNbytes(sizes, strides, tensor.dtype().itemsize(), offset);
    if (needed > tensor.storage().nbytes()) resize_storage(tensor.storage(), needed);
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
}

// One call of an operator on tensors of one device.
class Call {
  public:
    Call(c10::OperatorHandle op, Stack arguments)
        : op_(std::move(op)),
          arguments_(std::move(arguments)),
          device_(device_of_call(op_, arguments_)),
          guard_(device_) {}

    // Leaves the results on `stack`.
    void run(Stack& stack) {
        if (needs_values(op_) || !run_late(stack)) run_at_once(stack);
    }

  private:
    // False if the outputs cannot be inferred, also because the arguments are wrong: then the CPU's kernel says so.
    bool run_late(Stack& stack) {
        const bool by_kernel = is_inferred_by_kernel(op_);
        const Signature signature(op_, arguments_, by_kernel);
        auto inferred = Inferences::instance().find(signature);
        if (!inferred) inferred = infer(by_kernel, signature);
        if (!inferred) return false;
        std::vector<at::Tensor> fresh;
        for (size_t i = 0; i < inferred->size(); ++i) {
            stack.push_back(result(i, (*inferred)[i], [&](const at::Tensor& twin) {
                fresh.push_back(twin.defined() ? empty_like_twin(twin, device_) : twin);
                return fresh.back();
            }));
        }
        queue(fresh);
        return true;
    }

    std::optional<Stack> infer(bool by_kernel, const Signature& signature) {
        Twins twins(by_kernel ? Memory::zeros : Memory::none);
        Stack blank, inferred;
        try {
            const KernelState state;
            blank = twins_of(arguments_, twins);
            inferred = blank;
            const auto key = by_kernel ? c10::DispatchKey::CPU : c10::DispatchKey::Meta;
            op_.redispatchBoxed(c10::DispatchKeySet(key), &inferred);
        } catch (const std::exception& error) {
            if (std::getenv("LATE_TRACE") != nullptr) std::cerr << op_.operator_name() << ": " << error.what() << '\n';
            Scheduler::instance().count_failed_inference();
            return std::nullopt;
        }
        bool resized = false;
        for (size_t i = 0; i < arguments_.size(); ++i) {
            if (is_written(op_.schema().arguments()[i].alias_info())) resized |= follow_resize(arguments_[i], blank[i]);
        }
        if (!resized) Inferences::instance().keep(op_, signature, inferred);
        return inferred;
    }

    void queue(const std::vector<at::Tensor>& fresh) {
        Twins twins(Memory::shared);
        Stack on_host;
        std::vector<at::Tensor> outputs;
        {
            const KernelState state;
            on_host = twins_of(arguments_, twins);
            for (const auto& tensor : fresh) outputs.push_back(twins.of(tensor));
        }
        auto work = [op = op_, on_host = std::move(on_host), outputs = std::move(outputs)]() mutable {
            const KernelState state;
            try {
                op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &on_host);
                store(op, on_host, outputs);
            } catch (c10::Error& error) {
                error.add_context("Queued call of " + toString(op.operator_name()));
                throw;
            }
        };
        Scheduler::instance().enqueue(current_stream(device_.index()), Kind::kernel, std::move(work));
    }

    // Copies results of the CPU's kernel into the outputs that were inferred.
    static void store(const c10::OperatorHandle& op, const Stack& results, const std::vector<at::Tensor>& outputs) {
        size_t next = 0;
        for (size_t i = 0; i < results.size(); ++i) {
            if (is_written(op.schema().returns()[i].alias_info())) continue;
            map_tensors(results[i], [&](const at::Tensor& value) {
                const auto& output = outputs.at(next++);
                const bool same =
                    output.defined() == value.defined() &&
                    (!value.defined() || (output.sizes() == value.sizes() && output.dtype() == value.dtype()));
                TORCH_CHECK(same, "late: outputs of ", op.operator_name(), " were inferred wrongly");
                if (value.defined()) output.copy_(value);
                return value;
            });
        }
    }

    void run_at_once(Stack& stack) {
        auto& scheduler = Scheduler::instance();
        scheduler.count_at_once(toString(op_.operator_name()));
        scheduler.wait_for_stream(current_stream(device_.index()));
        Stack results;
        {
            const KernelState state;
            Twins twins(Memory::shared);
            results = twins_of(arguments_, twins);
            op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &results);
        }
        for (size_t i = 0; i < results.size(); ++i) {
            stack.push_back(result(i, results[i], [&](const at::Tensor& value) {
                if (!value.defined()) return value;
                auto made = empty_like_twin(value, device_);
                const KernelState state;
                Twins(Memory::shared).of(made).copy_(value);
                return made;
            }));
        }
    }

    // The call's result `i`: the argument that it aliases, or `make` of each of its tensors.
    template <class Make>
    c10::IValue result(size_t i, const c10::IValue& value, Make make) {
        const auto* const alias = op_.schema().returns()[i].alias_info();
        if (!is_written(alias)) return map_tensors(value, make);
        for (size_t j = 0; j < arguments_.size(); ++j) {
            const auto* const other = op_.schema().arguments()[j].alias_info();
            if (other != nullptr && *other == *alias) return arguments_[j];
        }
        TORCH_CHECK(false, "late: no argument of ", op_.operator_name(), " is its result ", i);
    }

    // Resizes outputs (`out=`) that the meta kernel resized. True if there are any.
    static bool follow_resize(const c10::IValue& argument, const c10::IValue& twin) {
        std::vector<at::Tensor> resized;
        map_tensors(twin, [&](const at::Tensor& tensor) { return resized.emplace_back(tensor); });
        size_t next = 0;
        bool any = false;
        map_tensors(argument, [&](const at::Tensor& tensor) {
            const auto& like = resized.at(next++);
            if (is_late(tensor) && tensor.sizes() != like.sizes()) {
                resize_tensor(tensor, like.sizes(), like.strides());
                any = true;
            }
            return tensor;
        });
        return any;
    }

    c10::OperatorHandle op_;
    Stack arguments_;
    c10::Device device_;
    c10::DeviceGuard guard_;
};

inline void fallback(const c10::OperatorHandle& op, Stack* stack) {
    if (is_view(op.schema())) {
        op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
        return;
    }
    Call(op, torch::jit::pop(*stack, op.schema().arguments().size())).run(*stack);
}

}  // namespace late
