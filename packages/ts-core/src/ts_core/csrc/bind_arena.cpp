#include "bind_arena.h"

#include <pybind11/stl.h>

#include "arena.h"
#include "arguments.h"
#include "gil.h"
#include "platform.h"

namespace py = pybind11;

namespace ts {
namespace {

std::string py_add_slab(Arena& arena, long long bytes, bool pin, int device,
                        long long touch_threads, bool release_when_free) {
  const std::size_t count = checked_count("nbytes", bytes, 1);
  if (count == 0 || count % platform::page_bytes() != 0) {
    throw std::invalid_argument("nbytes=" + std::to_string(bytes) +
                                ": a slab is a positive multiple of the page size, " +
                                std::to_string(platform::page_bytes()));
  }
  const int threads = checked_threads(touch_threads);
  const GilReleased unlocked;
  return arena.add_slab({count, pin, device, threads, release_when_free});
}

std::unique_ptr<Block> py_carve(Arena& arena, long long bytes, bool pinned,
                                const std::string& tag) {
  return arena.carve(checked_count("nbytes", bytes, 1), pinned, tag);
}

py::dict py_stats(const Arena& arena) {
  const ArenaStats stats = arena.stats();
  py::dict dict;
  dict["slab_bytes"] = stats.slab_bytes;
  dict["pinned_bytes"] = stats.pinned_bytes;
  dict["used_bytes"] = stats.used_bytes;
  dict["slabs"] = stats.slabs;
  dict["largest_free"] = stats.largest_free;
  dict["largest_free_pinned"] = stats.largest_free_pinned;
  dict["blocks"] = stats.blocks;
  dict["system_calls"] = stats.system_calls;
  dict["live_bytes"] = stats.live_bytes;
  return dict;
}

}  // namespace

void bind_arena(py::module_& m) {
  m.def("page_bytes", &platform::page_bytes);

  // The buffer protocol lets torch.frombuffer hold the block: it goes back to its slab when the
  // last tensor that shares its storage is gone.
  py::class_<Block>(m, "Block", py::buffer_protocol())
      .def_property_readonly("address",
                             [](const Block& block) {
                               return reinterpret_cast<std::uintptr_t>(block.address());
                             })
      .def_property_readonly("nbytes", &Block::bytes)
      .def_property_readonly("tag", &Block::tag)
      .def_buffer([](Block& block) {
        return py::buffer_info(reinterpret_cast<std::uint8_t*>(block.address()),
                               static_cast<py::ssize_t>(block.bytes()));
      });

  py::class_<Arena, std::shared_ptr<Arena>>(m, "Arena")
      .def(py::init([] { return std::make_shared<Arena>(); }))
      .def("carve", &py_carve)
      .def("add_slab", &py_add_slab)
      .def("pin_slabs", &Arena::pin_slabs, py::call_guard<GilReleased>())
      .def("trim", &Arena::trim, py::call_guard<GilReleased>())
      .def("stats", &py_stats);
}

}  // namespace ts
