// A tensor handed to an op, looked at before a kernel runs. Every failed check is a std::runtime_error that names the
// op and the argument, and says what it is and what was expected.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdio>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "kernels.h"

namespace localllm {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Words as they are, and numbers. No stream: one that is linked into a CUDA library writes numbers by the rules of
// another copy of itself in this process, and crashes.
template <class Part>
void append_to(std::string& text, const Part& part) {
  if constexpr (std::is_floating_point_v<Part>) {
    char digits[32];
    std::snprintf(digits, sizeof digits, "%g", (double)part);
    text += digits;
  } else if constexpr (std::is_integral_v<Part>) {
    text += std::to_string(part);
  } else {
    text += part;
  }
}

template <class... Parts>
[[noreturn, gnu::cold, gnu::noinline]] void refuse(const Parts&... parts) {
  std::string text;
  (append_to(text, parts), ...);
  throw std::runtime_error(text);
}

const char* name_of(ScalarType type);

// A dimension as long as it likes.
constexpr int64_t ANY = -1;

// An op's name, and where it runs: on the CPU, or on the CUDA device of one of its tensors.
struct Op {
  Op(const char* name) : name(name) {}
  Op(const char* name, const Tensor& on_cuda);

  const char* name;
  bool cuda = false;
  int device = 0;
};

class Argument {
 public:
  // Lies where the op runs.
  Argument(const Op& op, const char* name, const Tensor& tensor);

  // Has these dimensions. Those of tables must fit in 32 bits, which is what some kernels count in.
  Argument& shaped(std::initializer_list<int64_t> lengths);
  Argument& of(ScalarType type);
  Argument& dense();        // contiguous
  Argument& dense_rows();   // contiguous from the second dimension on
  Argument& written_rows(); // and its rows do not overlap
  // Whole numbers, int32 or int64, from 0 to limit - 1, contiguous. On a CUDA device the host cannot look at them.
  Argument& below(int64_t limit);

  int64_t dims() const { return dims_; }
  int64_t size(int64_t dim) const { return sizes_[dim]; }
  int64_t count() const;   // elements
  int64_t stride() const;  // from row to row
  int64_t bytes() const;   // of one element
  Type number() const;     // one of the three float types
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
