// Outputs of operators, inferred once for each layout of their arguments: meta kernels in Python take most of a call.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/DefaultDtype.h>

#include <mutex>
#include <optional>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

namespace late {

using torch::jit::Stack;

inline bool is_late(const at::Tensor& tensor) { return tensor.defined() && tensor.is_privateuseone(); }

// Calls `visit` with each tensor of `value`, and returns `value` with its results in their places.
template <class Visit>
c10::IValue map_tensors(const c10::IValue& value, Visit visit) {
    if (value.isTensor()) return visit(value.toTensor());
    if (value.isTensorList()) {
        c10::List<at::Tensor> results;
        for (const auto& tensor : value.toTensorVector()) results.push_back(visit(tensor));
        return results;
    }
    if (value.isOptionalTensorList()) {
        c10::List<std::optional<at::Tensor>> results;
        for (const auto& tensor : value.toOptionalTensorVector()) {
            results.push_back(tensor ? std::optional(visit(*tensor)) : tensor);
        }
        return results;
    }
    return value;
}

inline bool is_written(const c10::AliasInfo* alias) { return alias != nullptr && alias->isWrite(); }

// All of a call that its outputs' layouts depend on, as bytes: layouts of its tensors, which of them share memory, and
// its other arguments.
class Signature {
  public:
    Signature(const c10::OperatorHandle& op, const Stack& arguments, bool by_kernel) {
        put(&op.schema());
        put(by_kernel);
        put(c10::get_default_dtype_as_scalartype());
        for (const auto& argument : arguments) add(argument);
    }

    // False if an argument is of a kind that is not compared.
    bool is_complete() const { return complete_; }
    const std::string& bytes() const { return bytes_; }

  private:
    template <class Value>
    void put(const Value& value) {
        static_assert(std::is_trivially_copyable_v<Value>);
        bytes_.append(reinterpret_cast<const char*>(&value), sizeof(value));
    }

    template <class List>
    void put_all(const List& values) {
        put(values.size());
        for (const auto& value : values) put(value);
    }

    void add(const c10::IValue& value) {
        bytes_ += value.tagKind();
        if (value.isTensor()) {
            add(value.toTensor());
        } else if (value.isTensorList() || value.isOptionalTensorList()) {
            put(value.toListRef().size());
            for (const auto& each : value.toListRef()) add(each);
        } else if (value.isInt()) {
            put(value.toInt());
        } else if (value.isDouble()) {
            put(value.toDouble());
        } else if (value.isBool()) {
            put(value.toBool());
        } else if (value.isDevice()) {
            put(value.toDevice().type());
        } else if (value.isIntList()) {
            put_all(value.toIntVector());
        } else if (value.isDoubleList()) {
            put_all(value.toDoubleVector());
        } else if (value.isString()) {
            put_all(value.toStringRef());
        } else {
            complete_ = complete_ && value.isNone();
        }
    }

    void add(const at::Tensor& tensor) {
        put(tensor.defined());
        if (!tensor.defined()) return;
        complete_ = complete_ && tensor.has_storage();
        if (!complete_) return;
        put(is_late(tensor));
        put(tensor.scalar_type());
        put_all(tensor.sizes());
        put_all(tensor.strides());
        put(tensor.storage_offset());
        put(tensor.storage().nbytes());
        put(index_of(tensor.storage()));
        const bool number = tensor.unsafeGetTensorImpl()->is_wrapped_number();  // meta kernels see its value
        put(number);
        if (number) bytes_.append(static_cast<const char*>(tensor.const_data_ptr()), tensor.element_size());
    }

    size_t index_of(const at::Storage& storage) {
        for (size_t i = 0; i < storages_.size(); ++i) {
            if (storages_[i] == storage.unsafeGetStorageImpl()) return i;
        }
        storages_.push_back(storage.unsafeGetStorageImpl());
        return storages_.size() - 1;
    }

    std::string bytes_;
    bool complete_ = true;
    std::vector<const c10::StorageImpl*> storages_;
};

// Outputs that were inferred before.
class Inferences {
  public:
    static Inferences& instance() {
        static auto& inferences = *new Inferences;  // threads may outlive main
        return inferences;
    }

    std::optional<Stack> find(const Signature& signature) {
        const std::lock_guard lock(mutex_);
        const auto known = outputs_.find(signature.bytes());
        return signature.is_complete() && known != outputs_.end() ? std::optional(known->second) : std::nullopt;
    }

    // Keeps layouts alone, of what the call does not write in place.
    void keep(const c10::OperatorHandle& op, const Signature& signature, const Stack& outputs) {
        if (!signature.is_complete()) return;
        Stack layouts;
        for (size_t i = 0; i < outputs.size(); ++i) {
            const bool written = is_written(op.schema().returns()[i].alias_info());
            layouts.push_back(written ? c10::IValue() : map_tensors(outputs[i], [](const at::Tensor& tensor) {
                return tensor.defined() ? at::Tensor(at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(),
                                                                                    tensor.scalar_type()))
                                        : tensor;
            }));
        }
        const std::lock_guard lock(mutex_);
        outputs_.emplace(signature.bytes(), std::move(layouts));
    }

  private:
    std::mutex mutex_;
    std::unordered_map<std::string, Stack> outputs_;
};

}  // namespace late
