#include "arguments.h"

#include <string>

namespace localllm {
namespace {

std::string shape_text(int64_t dims, const int64_t* lengths) {
  std::string text = "[";
  for (int64_t dim = 0; dim < dims; dim++)
    text += (dim ? ", " : "") + (lengths[dim] == ANY ? std::string("any") : std::to_string(lengths[dim]));
  return text + "]";
}

template <class T>
int64_t first_outside(const T* values, int64_t count, int64_t limit) {
  for (int64_t index = 0; index < count; index++)
    if (values[index] < 0 || values[index] >= limit) return index;
  return count;
}

}  // namespace

const char* name_of(ScalarType type) {
  switch (type) {
    case ScalarType::Float: return "float32";
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Half: return "float16";
    case ScalarType::Double: return "float64";
    case ScalarType::Char: return "int8";
    case ScalarType::Byte: return "uint8";
    case ScalarType::Int: return "int32";
    case ScalarType::Long: return "int64";
    case ScalarType::Float8_e4m3fn: return "float8_e4m3fn";
    default: return "of an unsupported type";
  }
}

Op::Op(const char* name, const Tensor& on_cuda) : name(name), cuda(true), device(on_cuda.get_device()) {}

Argument::Argument(const Op& op, const char* name, const Tensor& tensor)
    : op_(op.name), name_(name), cuda_(op.cuda), data_(tensor.data_ptr()), dims_(tensor.dim()),
      sizes_(tensor.sizes().data()), strides_(tensor.strides().data()), type_(tensor.scalar_type()) {
  if (cuda_ ? !tensor.is_cuda() : !tensor.is_cpu())
    refuse(op_, ": ", name_, " is not on ", cuda_ ? "a CUDA device" : "the CPU");
  if (cuda_ && tensor.get_device() != op.device)
    refuse(op_, ": ", name_, " is on CUDA device ", (int)tensor.get_device(), ", ", op.device, " expected");
}

Argument& Argument::shaped(std::initializer_list<int64_t> lengths) {
  bool fits = dims_ == (int64_t)lengths.size();
  for (int64_t dim = 0; fits && dim < dims_; dim++)
    fits = lengths.begin()[dim] == ANY || sizes_[dim] == lengths.begin()[dim];
  if (!fits)
    refuse(op_, ": ", name_, " has shape ", shape_text(dims_, sizes_), ", ",
           shape_text(lengths.size(), lengths.begin()), " expected");
  for (int64_t dim = 0; dims_ > 1 && dim < dims_; dim++)
    if (sizes_[dim] > INT32_MAX)
      refuse(op_, ": ", name_, " has shape ", shape_text(dims_, sizes_), ", at most ", INT32_MAX,
             " per dimension expected");
  return *this;
}

Argument& Argument::of(ScalarType type) {
  if (type_ != type) refuse(op_, ": ", name_, " is ", name_of(type_), ", ", name_of(type), " expected");
  return *this;
}

Argument& Argument::dense() {
  dense_rows();
  if (dims_ > 0 && count() > 0 && sizes_[0] > 1 && strides_[0] != count() / sizes_[0])
    refuse(op_, ": ", name_, " of shape ", shape_text(dims_, sizes_), " has strides ", shape_text(dims_, strides_),
           ", a contiguous tensor expected");
  return *this;
}

Argument& Argument::dense_rows() {
  int64_t expected = 1;
  if (count() == 0) return *this;
  for (int64_t dim = dims_ - 1; dim > 0; expected *= sizes_[dim--])
    if (sizes_[dim] > 1 && strides_[dim] != expected)
      refuse(op_, ": ", name_, " of shape ", shape_text(dims_, sizes_), " has strides ", shape_text(dims_, strides_),
             ", a tensor that is dense from its second dimension on expected");
  return *this;
}

Argument& Argument::written_rows() {
  dense_rows();
  if (count() > 0 && sizes_[0] > 1 && strides_[0] < count() / sizes_[0])
    refuse(op_, ": ", name_, " is an output, but its rows overlap: shape ", shape_text(dims_, sizes_), ", strides ",
           shape_text(dims_, strides_));
  return *this;
}

Argument& Argument::below(int64_t limit) {
  dense();
  int64_t outside = count();
  if (cuda_) return *this;
  if (type_ == ScalarType::Int) outside = first_outside(data<int32_t>(), count(), limit);
  else if (type_ == ScalarType::Long) outside = first_outside(data<int64_t>(), count(), limit);
  else refuse(op_, ": ", name_, " is ", name_of(type_), ", int32 or int64 expected");
  if (outside < count())
    refuse(op_, ": ", name_, "[", outside, "] is ",
           type_ == ScalarType::Int ? data<int32_t>()[outside] : data<int64_t>()[outside], ", 0 to ", limit - 1,
           " expected");
  return *this;
}

int64_t Argument::count() const {
  int64_t count = 1;
  for (int64_t dim = 0; dim < dims_; dim++) count *= sizes_[dim];
  return count;
}

int64_t Argument::stride() const { return dims_ > 0 ? strides_[0] : 0; }

int64_t Argument::bytes() const {
  switch (type_) {
    case ScalarType::Double:
    case ScalarType::Long: return 8;
    case ScalarType::Float:
    case ScalarType::Int: return 4;
    case ScalarType::BFloat16:
    case ScalarType::Half: return 2;
    case ScalarType::Char:
    case ScalarType::Byte:
    case ScalarType::Float8_e4m3fn: return 1;
    default: refuse(op_, ": ", name_, " has an element type that the kernels do not support");
  }
}

Type Argument::number() const {
  switch (type_) {
    case ScalarType::Float: return Type::f32;
    case ScalarType::BFloat16: return Type::bf16;
    case ScalarType::Half: return Type::f16;
    default: refuse(op_, ": ", name_, " is ", name_of(type_), ", float32, bfloat16 or float16 expected");
  }
}

}  // namespace localllm
