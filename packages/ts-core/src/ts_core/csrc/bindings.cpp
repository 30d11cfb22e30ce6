// The Python module ts_core._host: plain functions over addresses, sizes and handles. The typed
// and documented face of it is ts_core/_native.py.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <tuple>
#include <vector>

#include "adamw.h"
#include "arguments.h"
#include "bind_arena.h"
#include "copy.h"
#include "cores.h"
#include "dispatch.h"
#include "driver.h"
#include "event_wait.h"
#include "gil.h"
#include "grad_stats.h"
#include "memory_stream.h"
#include "numa.h"
#include "platform.h"
#include "thread_pool.h"
#include "version.h"

namespace py = pybind11;

namespace ts {
namespace {

using Address = std::uint64_t;

void py_copy_bytes(Address to, Address from, long long bytes, long long threads) {
  const std::size_t count = checked_count("nbytes", bytes, 1);
  check_ranges({{"dst_ptr", to, count}, {"src_ptr", from, count}});
  const int wanted = checked_threads(threads);
  const GilReleased unlocked;
  copy_bytes(pointer<void>(to), pointer<const void>(from), count, wanted);
}

std::uint64_t first_block(long long base) {
  if (base < 0 || base % kMomentBlock != 0) {
    throw std::invalid_argument("base=" + std::to_string(base) +
                                ": expected a multiple of " + std::to_string(kMomentBlock) +
                                ", 0 or more");
  }
  return static_cast<std::uint64_t>(base / kMomentBlock);
}

void py_adamw_step(Address param, const std::string& param_dtype, Address grad,
                   const std::string& grad_dtype, Address exp_avg, Address exp_avg_sq,
                   Address master, long long n, double lr, double beta1, double beta2, double eps,
                   double weight_decay, long long step, double grad_scale, long long threads,
                   const std::string& moments, Address exp_avg_scale, Address exp_avg_sq_scale,
                   std::uint64_t seed, long long base) {
  const DType param_type = parse_dtype("param_dtype", param_dtype);
  const DType grad_type = parse_dtype("grad_dtype", grad_dtype);
  const MomentType moment_type = parse_moments(moments);
  const AdamWOptions options{lr, beta1, beta2, eps, weight_decay, step, grad_scale};
  check_options(options);
  const std::size_t count = checked_count("n", n, sizeof(float));
  const std::uint64_t wide = count * sizeof(float);
  const std::uint64_t moment = count * moment_bytes(moment_type);
  const std::uint64_t scales = scale_bytes(moment_type, count);
  check_ranges({{"param_ptr", param, count * element_bytes(param_type)},
                {"grad_ptr", grad, count * element_bytes(grad_type)},
                {"exp_avg_ptr", exp_avg, moment},
                {"exp_avg_sq_ptr", exp_avg_sq, moment},
                {"exp_avg_scale_ptr", exp_avg_scale, scales},
                {"exp_avg_sq_scale_ptr", exp_avg_sq_scale, scales},
                {"master_ptr", master, master != 0 ? wide : 0}});
  const int wanted = checked_threads(threads);
  const Rounding rounding{seed, first_block(base)};
  const bool scaled = moment_type == MomentType::int8;
  const AdamWTensors tensors{
      pointer<void>(param),
      param_type,
      pointer<const void>(grad),
      grad_type,
      {moment_type, Moment::exp_avg, pointer<void>(exp_avg),
       pointer<float>(scaled ? exp_avg_scale : 0)},
      {moment_type, Moment::exp_avg_sq, pointer<void>(exp_avg_sq),
       pointer<float>(scaled ? exp_avg_sq_scale : 0)},
      pointer<float>(master),
      count};
  const GilReleased unlocked;
  adamw_step(tensors, options, rounding, wanted);
}

StoredMoment stored_moment(Address values, Address scales, const std::string& moments,
                           const std::string& which) {
  const MomentType type = parse_moments(moments);
  if (which != "exp_avg" && which != "exp_avg_sq") {
    throw std::invalid_argument("which='" + which + "' is not one of 'exp_avg', 'exp_avg_sq'");
  }
  return {type, which == "exp_avg" ? Moment::exp_avg : Moment::exp_avg_sq, pointer<void>(values),
          pointer<float>(type == MomentType::int8 ? scales : 0)};
}

void py_moments_to_float32(Address values, Address scales, Address to, long long n,
                           const std::string& moments, const std::string& which,
                           long long threads) {
  const StoredMoment moment = stored_moment(values, scales, moments, which);
  const std::size_t count = checked_count("n", n, sizeof(float));
  check_ranges({{"stored_ptr", values, count * moment_bytes(moment.type)},
                {"scale_ptr", scales, scale_bytes(moment.type, count)},
                {"float_ptr", to, count * sizeof(float)}});
  const int wanted = checked_threads(threads);
  const GilReleased unlocked;
  moments_to_float32(moment, pointer<float>(to), count, wanted);
}

void py_moments_from_float32(Address from, Address values, Address scales, long long n,
                             const std::string& moments, const std::string& which,
                             std::uint64_t seed, long long step, long long base,
                             long long threads) {
  const StoredMoment moment = stored_moment(values, scales, moments, which);
  const std::size_t count = checked_count("n", n, sizeof(float));
  check_ranges({{"float_ptr", from, count * sizeof(float)},
                {"stored_ptr", values, count * moment_bytes(moment.type)},
                {"scale_ptr", scales, scale_bytes(moment.type, count)}});
  const int wanted = checked_threads(threads);
  const std::uint64_t block = first_block(base);
  const std::uint64_t key = random_key(seed, static_cast<std::uint64_t>(step));
  const GilReleased unlocked;
  moments_from_float32(pointer<const float>(from), moment, count, key, block, wanted);
}

py::tuple py_grad_stats(Address grad, const std::string& dtype, long long n, long long threads) {
  const DType type = parse_dtype("dtype", dtype);
  const std::size_t count = checked_count("n", n, sizeof(float));
  check_range({"grad_ptr", grad, count * element_bytes(type)});
  const int wanted = checked_threads(threads);
  GradStats stats{};
  {
    const GilReleased unlocked;
    stats = grad_stats(pointer<const void>(grad), type, count, wanted);
  }
  return py::make_tuple(stats.sum_of_squares, stats.nonfinite);
}

void py_stream_memory(const std::vector<std::tuple<Address, long long, bool>>& regions,
                      long long parts, long long parts_per_turn, long long threads,
                      std::uint8_t flip) {
  std::vector<StreamRegion> checked;
  for (const auto& [address, bytes, written] : regions) {
    const std::size_t count = checked_count("bytes", bytes, 1);
    check_range({"address", address, count});
    checked.push_back({pointer<void>(address), count, written});
  }
  if (parts < 1 || parts_per_turn < 1) {
    throw std::invalid_argument("parts=" + std::to_string(parts) + ", parts_per_turn=" +
                                std::to_string(parts_per_turn) + ": expected 1 or more of each");
  }
  const int wanted = checked_threads(threads);
  const GilReleased unlocked;
  stream_memory(checked, static_cast<std::size_t>(parts),
                static_cast<std::size_t>(parts_per_turn), wanted, flip);
}

void check_event(Address event) {
  if (event == 0) {
    throw std::invalid_argument("event=0: expected the handle of a recorded CUDA event");
  }
}

// Returns whether the event is done within `timeout_s` (negative: however long it takes). Signals
// such as Ctrl-C are served meanwhile.
bool py_wait_event(Address event, int device, double timeout_s) {
  check_event(event);
  constexpr std::int64_t kSliceUs = 50000;
  std::int64_t left_us = timeout_s < 0 ? -1 : static_cast<std::int64_t>(timeout_s * 1e6);
  for (bool resumed = false;; resumed = true) {
    const std::int64_t slice_us = left_us < 0 || left_us > kSliceUs ? kSliceUs : left_us;
    bool done = false;
    {
      const GilReleased unlocked;
      done = wait_event_for(event, device, slice_us, resumed);
    }
    if (done) return true;
    if (left_us >= 0 && (left_us -= slice_us) <= 0) return false;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  }
}

bool py_event_done(Address event, int device) {
  check_event(event);
  const GilReleased unlocked;
  const driver::ContextGuard context(device);
  return driver::event_done(event);
}

void py_set_event_wait(const std::string& policy, long spin_us, long sleep_us) {
  WaitSettings settings;
  if (policy == "poll") {
    settings.policy = WaitPolicy::poll;
  } else if (policy == "spin") {
    settings.policy = WaitPolicy::spin;
  } else if (policy == "block") {
    settings.policy = WaitPolicy::block;
  } else {
    throw std::invalid_argument("policy='" + policy + "' is not one of 'poll', 'spin', 'block'");
  }
  constexpr long kMostUs = 10 * 1000 * 1000;
  if (spin_us < 0 || spin_us > kMostUs || sleep_us < 1 || sleep_us > kMostUs) {
    throw std::invalid_argument("spin_us=" + std::to_string(spin_us) + ", sleep_us=" +
                                std::to_string(sleep_us) +
                                ": expected microseconds, spin_us in 0 .. 10000000 and sleep_us "
                                "in 1 .. 10000000");
  }
  settings.spin_us = spin_us;
  settings.sleep_us = sleep_us;
  set_wait_settings(settings);
}

py::tuple py_event_wait() {
  const WaitSettings settings = wait_settings();
  const char* names[] = {"poll", "spin", "block"};
  return py::make_tuple(names[static_cast<int>(settings.policy)], settings.spin_us,
                        settings.sleep_us);
}

std::string py_register_memory(Address address, long long bytes, int device) {
  const std::size_t count = checked_count("nbytes", bytes, 1);
  check_range({"ptr", address, count});
  const GilReleased unlocked;
  return driver::register_memory(pointer<void>(address), count, device);
}

std::string py_unregister_memory(Address address, int device) {
  const GilReleased unlocked;
  return driver::unregister_memory(pointer<void>(address), device);
}

py::list py_driver_devices() {
  py::list list;
  for (const driver::Device& device : driver::devices()) {
    list.append(py::make_tuple(device.name, device.memory_bytes));
  }
  return list;
}

}  // namespace
}  // namespace ts

PYBIND11_MODULE(_host, m) {
  using namespace ts;
  m.attr("csrc_hash") = py::str(csrc_marker()).attr("partition")("=").attr("__getitem__")(2);
  py::register_exception<driver::Error>(m, "DriverError", PyExc_RuntimeError);
  forget_pool_in_children();

  m.def("copy_bytes", &py_copy_bytes);
  m.def("adamw_step", &py_adamw_step);
  m.def("moments_to_float32", &py_moments_to_float32);
  m.def("moments_from_float32", &py_moments_from_float32);
  m.attr("moment_block") = py::int_(kMomentBlock);
  m.def("grad_stats", &py_grad_stats);
  m.def("stream_memory", &py_stream_memory);

  m.def("available_simd_levels", &available_simd_levels);
  m.def("simd_level", &simd_level);
  m.def("set_simd_level", &set_simd_level);
  m.def("usable_cores", &usable_cores);
  m.def("cgroup_cpu_quota", &cgroup_cpu_quota);
  m.def("override_usable_cores", &override_usable_cores);
  m.def("pool_threads", &pool_threads);
  m.def("memory_nodes", &platform::memory_nodes);
  m.def("page_node", [](Address address) {
    std::vector<int> nodes(1);
    const bool told = platform::nodes_of({pointer<const void>(address)}, nodes);
    return told ? nodes[0] : -1;
  });
  m.def("current_node", &platform::current_node);
  m.def("pretend_nodes", &pretend_nodes);
  m.def("pretended_places", [] { return py::make_tuple(pretended_near(), pretended_far()); });
  m.def("shutdown_pool", [] {
    const GilReleased unlocked;
    shutdown_pool();
  });

  m.def("driver_unavailable_reason", &driver::unavailable_reason,
        py::call_guard<GilReleased>());
  m.def("use_driver_library", &driver::use_library);
  m.def("driver_version", &driver::version);
  m.def("driver_devices", &py_driver_devices);
  m.def("wait_event", &py_wait_event);
  m.def("event_done", &py_event_done);
  m.def("set_event_wait", &py_set_event_wait);
  m.def("event_wait", &py_event_wait);
  m.def("register_memory", &py_register_memory);
  m.def("unregister_memory", &py_unregister_memory);

  bind_arena(m);
}
