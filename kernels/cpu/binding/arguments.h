// Checks of the tensors that an op receives, before its kernel runs. A failed check throws std::runtime_error with the
// op, the argument, its value and the expected value.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdio>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "../kernels.h"

namespace localllm {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Appends a text or a number. It does not use a std::ostream: in the CUDA library, which contains its own copy of the
// stream code, a stream crashes because the process has a second copy.
template <class Value>
void append_to(std::string& text, const Value& value) {
  if constexpr (std::is_floating_point_v<Value>) {
    char digits[32];
    std::snprintf(digits, sizeof digits, "%g", (double)value);
    text += digits;
  } else if constexpr (std::is_integral_v<Value>) {
    text += std::to_string(value);
  } else {
    text += value;
  }
}

template <class... Values>
[[noreturn, gnu::cold, gnu::noinline]] void refuse(const Values&... values) {
  std::string text;
  (append_to(text, values), ...);
  throw std::runtime_error(text);
}

const char* name_of(ScalarType type);

// In a shape: a dimension of any length.
constexpr int64_t ANY = -1;

// The name of an op and the device of its tensors: the CPU, or one CUDA device.
struct Op {
  Op(const char* name) : name(name) {}
  Op(const char* name, const Tensor& on_cuda);

  const char* name;
  bool cuda = false;
  int device = 0;
};

class Argument {
 public:
  // Throws if the tensor is not on the device of the op.
  Argument(const Op& op, const char* name, const Tensor& tensor);

  // Each check throws if it fails and returns *this, so that checks can be chained.

  // Checks the shape. Every length of a tensor of two or more dimensions must fit in 32 bits, because some kernels use
  // int32.
  Argument& shaped(std::initializer_list<int64_t> lengths);
  Argument& of(ScalarType type);
  Argument& dense();         // contiguous
  Argument& dense_rows();    // contiguous from the second dimension on
  Argument& written_rows();  // as dense_rows, and the rows do not overlap
  // Contiguous int32 or int64 values from 0 to limit - 1. Does not check values on a CUDA device.
  Argument& below(int64_t limit);

  int64_t dims() const { return dims_; }
  int64_t size(int64_t dim) const { return sizes_[dim]; }
  int64_t count() const;   // number of elements
  int64_t stride() const;  // elements from row to row
  int64_t bytes() const;   // bytes of one element
  Type number() const;     // the element type; throws if it is not float32, bfloat16 or float16
  ScalarType type() const { return type_; }

  template <class T = void>
  T* data() const { return (T*)data_; }

 private:
  const char* op_;
  const char* name_;
  bool cuda_;
  void* data_;
  int64_t dims_;
  const int64_t* sizes_;
  const int64_t* strides_;
  ScalarType type_;
};

}  // namespace localllm
