// Element types of parameters and gradients, by torch's names.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>

namespace ts {

enum class DType : int { float32 = 0, bfloat16 = 1, float16 = 2 };
constexpr int kDTypes = 3;

inline DType parse_dtype(const char* argument, const std::string& name) {
  if (name == "float32") return DType::float32;
  if (name == "bfloat16") return DType::bfloat16;
  if (name == "float16") return DType::float16;
  throw std::invalid_argument(std::string(argument) + "='" + name +
                              "' is not one of 'float32', 'bfloat16', 'float16'");
}

inline std::size_t element_bytes(DType dtype) { return dtype == DType::float32 ? 4 : 2; }

}  // namespace ts
