#pragma once

#include <Python.h>

namespace ts {

// Lets other Python threads run during its lifetime.
//
// Unlike pybind11's own guard its destructor may throw: when the interpreter is being finalized,
// CPython (before 3.14) ends a daemon thread that asks for the GIL by unwinding its stack, which
// would abort the whole process at a destructor that promises not to throw.
class GilReleased {
 public:
  GilReleased() : state_(PyEval_SaveThread()) {}
  ~GilReleased() noexcept(false) { PyEval_RestoreThread(state_); }
  GilReleased(const GilReleased&) = delete;
  GilReleased& operator=(const GilReleased&) = delete;

 private:
  PyThreadState* state_;
};

}  // namespace ts
