// A device named "npu" on host memory, and a process-group back end "hccl" over gloo: what Covey's code does on an
// Ascend NPU apart from the kernels' numbers. Tensors are of the dispatch key PrivateUse1; an operation runs as torch's
// CPU kernel on a copy, after checks that only a real device would make: no operand in host memory, no operation or
// number type that the rules (rules.py) refuse. Every operation is counted.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

namespace npusim {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::ScalarType;
constexpr DeviceType kNpu = DeviceType::PrivateUse1;
constexpr DeviceIndex kNumDevices = 4;

thread_local DeviceIndex current_device = 0;

// ---------------------------------------------------------------------------------------------------------- memory

std::atomic<int64_t> bytes_now{0}, bytes_peak{0};

struct HostMemory final : c10::DeviceAllocator {
  static constexpr size_t kHeader = 64;  // keeps the size, and the data's alignment

  static void release(void* data) {
    if (data == nullptr) return;
    char* start = static_cast<char*>(data) - kHeader;
    bytes_now -= *reinterpret_cast<int64_t*>(start);
    std::free(start);
  }
  c10::DataPtr allocate(size_t size) override {
    const Device device(kNpu, current_device);
    if (size == 0) return {nullptr, nullptr, &release, device};
    void* start = nullptr;
    TORCH_CHECK(posix_memalign(&start, kHeader, size + kHeader) == 0, "npusim: out of memory");
    *static_cast<int64_t*>(start) = static_cast<int64_t>(size);
    const int64_t now = bytes_now += static_cast<int64_t>(size);
    int64_t peak = bytes_peak;
    while (now > peak && !bytes_peak.compare_exchange_weak(peak, now)) {
    }
    void* data = static_cast<char*>(start) + kHeader;
    return {data, data, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* kind : {&stats.allocated_bytes, &stats.reserved_bytes}) {
      (*kind)[0].current = bytes_now;
      (*kind)[0].peak = bytes_peak;
    }
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex) override { bytes_peak = bytes_now.load(); }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex) override {
    constexpr size_t total = size_t{64} << 30;
    return {total - static_cast<size_t>(bytes_now), total};
  }
};
HostMemory memory;
REGISTER_ALLOCATOR(kNpu, &memory);

// ---------------------------------------------------------------------------------------------- devices and streams

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr DeviceType static_type = kNpu;
  static c10::Stream only(Device device) { return c10::Stream(c10::Stream::DEFAULT, device); }

  DeviceType type() const override { return kNpu; }
  Device getDevice() const override { return {kNpu, current_device}; }
  void setDevice(Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.has_index()) current_device = device.index();
  }
  Device exchangeDevice(Device device) const override {
    const Device before = getDevice();
    setDevice(device);
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return kNumDevices; }
  c10::Stream getStream(Device device) const override { return only(device); }
  c10::Stream getDefaultStream(Device device) const override { return only(device); }
  c10::Stream getNewStream(Device device, int) const override { return only(device); }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override { return only(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return only(stream.device()); }
  void record(void** event, const c10::Stream&, DeviceIndex, c10::EventFlag) const override { *event = &memory; }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(DeviceIndex) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(DeviceIndex index) {
    device_ = Device(kNpu, index);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

at::Generator& default_generator(DeviceIndex index) {
  static std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (DeviceIndex i = 0; i < kNumDevices; ++i) made.push_back(at::make_generator<Generator>(i));
    return made;
  }();
  return all.at(index < 0 ? current_device : index);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(DeviceIndex index) const override {
    return at::make_generator<Generator>(index < 0 ? current_device : index);
  }
  Device getDeviceFromPtr(void*) const override { return {kNpu, current_device}; }
  at::Allocator* getPinnedMemoryAllocator() const override { return at::getCPUAllocator(); }
  bool isPinnedPtr(const void*) const override { return false; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    c10::DataPtr data = memory.allocate(size);
    if (impl->data() && data.get()) std::memcpy(data.get(), impl->data(), std::min(size, impl->nbytes()));
    impl->set_data_ptr_noswap(std::move(data));
    impl->set_nbytes(size);
  }
};
Hooks hooks;

// ------------------------------------------------------------------------------------------ operations that stay here

Device chosen(std::optional<Device> device) {
  return device && device->has_index() ? *device : Device(kNpu, current_device);
}

Tensor empty(
    c10::SymIntArrayRef size, std::optional<ScalarType> dtype, std::optional<c10::Layout>, std::optional<Device> device,
    std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  const c10::DeviceGuard guard(chosen(device));
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &memory, keys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(chosen(device));
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &memory, keys, c10::dtype_or_default(dtype));
}

// The same memory as a CPU tensor.
Tensor on_host(const Tensor& tensor) {
  if (!tensor.device().is_privateuseone()) return tensor;
  const auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  const Tensor keep = tensor;
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), [keep](void*) {}, options);
}

Tensor copy_from(const Tensor& source, const Tensor& target, bool) {
  const at::NoGradGuard no_grad;
  on_host(target).copy_(on_host(source));
  return target;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  if (target.sizes() != source.sizes()) target.resize_(source.sizes());
  return copy_from(source, target, false);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", [](const Tensor& x) { return on_host(x).item(); });
  m.impl(
      "as_strided",
      [](const Tensor& x, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
        std::optional<int64_t> start;
        if (offset) start = offset->expect_int();
        return at::native::as_strided_tensorimpl(
            x, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), start);
      });
  m.impl("view", [](const Tensor& x, c10::SymIntArrayRef size) {
    return at::native::view(x, C10_AS_INTARRAYREF_SLOW(size));
  });
  m.impl("_reshape_alias", [](const Tensor& x, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
    return at::native::_reshape_alias(x, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  });
  m.impl("unfold", [](const Tensor& x, int64_t dim, int64_t size, int64_t step) {
    return at::native::unfold(x, dim, size, step);
  });
  m.impl(
      "resize_",
      [](const Tensor& x, c10::SymIntArrayRef size, std::optional<c10::MemoryFormat> format) -> const Tensor& {
        return at::native::resize_(x, C10_AS_INTARRAYREF_SLOW(size), format);
      });
  m.impl(
      "set_.source_Storage_storage_offset",
      [](Tensor& x, c10::Storage source, c10::SymInt offset, c10::SymIntArrayRef size,
         c10::SymIntArrayRef stride) -> Tensor& {
        return at::cpu::set_(
            x, source, offset.expect_int(), C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
      });
  m.impl("set_.source_Storage", [](Tensor& x, c10::Storage source) -> Tensor& {
    const auto length = static_cast<int64_t>(source.nbytes() / x.dtype().itemsize());
    return at::cpu::set_(x, source, 0, at::IntArrayRef({length}), at::IntArrayRef({1}));
  });
  m.impl("set_.source_Tensor", [](Tensor& x, const Tensor& source) -> Tensor& {
    return at::native::set_tensor_(x, source);
  });
}

// --------------------------------------------------------------------------------- all others: counted and checked

struct Rule {
  std::vector<ScalarType> dtypes;  // of the first tensor; none: any
  bool refused;                    // otherwise counted as a fall back to the host
  std::string why;
};

std::mutex lock;
std::map<std::string, std::vector<Rule>> rules;
std::map<std::string, int64_t> counts, fallbacks;

std::vector<Tensor> tensors_of(const c10::IValue& value) {
  if (value.isTensor()) return {value.toTensor()};
  if (value.isTensorList()) return value.toTensorVector();
  std::vector<Tensor> found;
  if (value.isList()) {  // of optional tensors
    for (const c10::IValue& item : value.toListRef()) {
      if (item.isTensor()) found.push_back(item.toTensor());
    }
  }
  return found;
}

bool is_double(ScalarType dtype) { return dtype == ScalarType::Double || dtype == ScalarType::ComplexDouble; }

void check_devices(const std::string& name, const std::vector<Tensor>& operands) {
  const Tensor* first = nullptr;
  for (const Tensor& x : operands) {
    if (x.defined() && x.device().is_privateuseone() && first == nullptr) first = &x;
  }
  if (first == nullptr) return;
  for (const Tensor& x : operands) {
    const bool number = x.defined() && x.device().is_cpu() && x.dim() == 0;
    TORCH_CHECK(
        !x.defined() || number || x.device() == first->device(), "npusim: ", name, " got tensors on ", first->device(),
        " and on ", x.device());
  }
}

void check_rules(const std::string& name, const std::vector<Tensor>& operands) {
  for (const Tensor& x : operands) {
    TORCH_CHECK(
        !x.defined() || !is_double(x.scalar_type()) || x.device().is_cpu(), "npusim: ", name, " in ", x.scalar_type(),
        ": fp64 belongs on the host");
  }
  const std::lock_guard<std::mutex> guard(lock);
  ++counts[name];
  const auto found = rules.find(name);
  if (found == rules.end()) return;
  for (const Rule& rule : found->second) {
    bool applies = rule.dtypes.empty();
    for (const ScalarType dtype : rule.dtypes) {
      applies = applies || (!operands.empty() && operands[0].defined() && operands[0].scalar_type() == dtype);
    }
    if (!applies) continue;
    ++fallbacks[name];
    TORCH_CHECK(
        !rule.refused, "npusim: ", name, operands.empty() ? "" : " in ",
        operands.empty() ? "" : c10::toString(operands[0].scalar_type()), " is refused: ", rule.why);
  }
}

void run_on_copy(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const std::string& name = op.schema().name();
  std::vector<Tensor> operands;
  const auto values = torch::jit::last(*stack, arguments.size());
  for (size_t i = 0; i < arguments.size(); ++i) {
    for (const Tensor& x : tensors_of(values[i])) operands.push_back(x);
    const bool asks_for_double = arguments[i].name() == "dtype" && values[i].isInt() &&
        is_double(static_cast<ScalarType>(values[i].toInt()));
    TORCH_CHECK(!asks_for_double, "npusim: ", name, " asked for fp64, which belongs on the host");
    TORCH_CHECK(
        name != "aten::topk" || arguments[i].name() != "sorted" || values[i].toBool(),
        "npusim: aten::topk with sorted=False is refused: it is not supported");
  }
  check_devices(name, operands);
  check_rules(name, operands);
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_copy>());
}
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

// --------------------------------------------------------------------------------------------------------- "hccl"

using c10d::ReduceOp;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<Tensor>;

// gloo on the tensors' memory, with HCCL's refusals.
struct Hccl final : c10d::Backend {
  c10::intrusive_ptr<c10d::Backend> gloo;

  explicit Hccl(c10::intrusive_ptr<c10d::Backend> inner)
      : Backend(inner->getRank(), inner->getSize()), gloo(std::move(inner)) {}
  const std::string getBackendName() const override { return "hccl"; }

  static Tensor host(const Tensor& x) {
    TORCH_CHECK(x.device().is_privateuseone(), "npusim: hccl got a tensor on ", x.device());
    TORCH_CHECK(x.is_contiguous(), "npusim: hccl: Tensors must be contiguous");
    return on_host(x);
  }
  static Tensors host(const Tensors& all) {
    Tensors found;
    for (const Tensor& x : all) found.push_back(host(x));
    return found;
  }
  static std::vector<Tensors> host(const std::vector<Tensors>& all) {
    std::vector<Tensors> found;
    for (const Tensors& x : all) found.push_back(host(x));
    return found;
  }

  static void check_reduction(const ReduceOp& op, const Tensors& tensors) {
    using Op = ReduceOp::RedOpType;
    const auto kind = static_cast<Op>(op.op_);
    TORCH_CHECK(
        kind != Op::BAND && kind != Op::BOR && kind != Op::BXOR, "npusim: hccl has no bitwise reduction");
    for (const Tensor& x : tensors) {
      const ScalarType dtype = x.scalar_type();
      switch (dtype) {
        case ScalarType::Char: case ScalarType::Short: case ScalarType::Int: case ScalarType::Long:
        case ScalarType::Half: case ScalarType::BFloat16: case ScalarType::Float: case ScalarType::Bool:
        case ScalarType::Byte:
          break;
        default:
          TORCH_CHECK(false, "npusim: hccl: Unsupported data type ", dtype, " for a reduction");
      }
      // HCCL sums and then divides in place, which an integer tensor cannot hold.
      TORCH_CHECK(
          kind != Op::AVG || c10::isFloatingType(dtype), "npusim: hccl: AVG of ", dtype,
          ": result type Float can't be cast to the tensor's type");
    }
  }

  // reduce(opts), as SUM with the scaling around it that torch_npu adds for AVG and PREMUL_SUM.
  template <class Options, class Reduce>
  WorkPtr reduced(Options opts, const Tensors& inputs, const Tensors& results, Reduce reduce) {
    check_reduction(opts.reduceOp, inputs);
    using Op = ReduceOp::RedOpType;
    const auto kind = static_cast<Op>(opts.reduceOp.op_);
    if (kind == Op::PREMUL_SUM) {
      const auto* factor = reinterpret_cast<const c10d::NCCLPreMulSumSupplement*>(opts.reduceOp.supplement_.get());
      for (const Tensor& x : inputs) {
        on_host(x).mul_(factor->tensor_factor.defined() ? on_host(factor->tensor_factor).item() :
                                                          at::Scalar(factor->double_factor));
      }
    }
    const bool average = kind == Op::AVG;
    if (average || kind == Op::PREMUL_SUM) opts.reduceOp = ReduceOp(Op::SUM);
    WorkPtr work = reduce(opts);
    if (average) {
      work->wait();
      for (const Tensor& x : results) on_host(x).div_(getSize());
    }
    return work;
  }

  WorkPtr allreduce(Tensors& t, const c10d::AllreduceOptions& o) override {
    Tensors v = host(t);
    return reduced(o, t, t, [&](const auto& opts) { return gloo->allreduce(v, opts); });
  }
  WorkPtr allreduce_coalesced(Tensors& t, const c10d::AllreduceCoalescedOptions& o) override {
    Tensors v = host(t);
    return reduced(o, t, t, [&](const auto& opts) { return gloo->allreduce_coalesced(v, opts); });
  }
  WorkPtr reduce(Tensors& t, const c10d::ReduceOptions& o) override {
    Tensors v = host(t);
    return reduced(o, t, t, [&](const auto& opts) { return gloo->reduce(v, opts); });
  }
  WorkPtr reduce_scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ReduceScatterOptions& o) override {
    Tensors v = host(out);
    std::vector<Tensors> w = host(in);
    return reduced(o, in.at(0), out, [&](const auto& opts) { return gloo->reduce_scatter(v, w, opts); });
  }
  WorkPtr _reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& o) override {
    Tensor v = host(out), w = host(in);
    return reduced(o, {in}, {out}, [&](const auto& opts) { return gloo->_reduce_scatter_base(v, w, opts); });
  }
  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& out, Tensors& in, const c10d::ReduceScatterOptions& o) override {
    Tensors v = host(out), w = host(in);
    return reduced(o, in, out, [&](const auto& opts) { return gloo->reduce_scatter_tensor_coalesced(v, w, opts); });
  }
  WorkPtr broadcast(Tensors& t, const c10d::BroadcastOptions& o) override {
    Tensors v = host(t);
    return gloo->broadcast(v, o);
  }
  WorkPtr allgather(std::vector<Tensors>& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    std::vector<Tensors> v = host(out);
    Tensors w = host(in);
    return gloo->allgather(v, w, o);
  }
  WorkPtr _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& o) override {
    Tensor v = host(out), w = host(in);
    return gloo->_allgather_base(v, w, o);
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    Tensors v = host(out), w = host(in);
    return gloo->allgather_into_tensor_coalesced(v, w, o);
  }
  WorkPtr gather(std::vector<Tensors>& out, Tensors& in, const c10d::GatherOptions& o) override {
    std::vector<Tensors> v = host(out);
    Tensors w = host(in);
    return gloo->gather(v, w, o);
  }
  WorkPtr scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ScatterOptions& o) override {
    Tensors v = host(out);
    std::vector<Tensors> w = host(in);
    return gloo->scatter(v, w, o);
  }
  WorkPtr alltoall_base(
      Tensor& out, Tensor& in, std::vector<int64_t>& out_sizes, std::vector<int64_t>& in_sizes,
      const c10d::AllToAllOptions& o) override {
    Tensor v = host(out), w = host(in);
    return gloo->alltoall_base(v, w, out_sizes, in_sizes, o);
  }
  WorkPtr send(Tensors& t, int rank, int tag) override {
    Tensors v = host(t);
    return gloo->send(v, rank, tag);
  }
  WorkPtr recv(Tensors& t, int rank, int tag) override {
    Tensors v = host(t);
    return gloo->recv(v, rank, tag);
  }
  WorkPtr barrier(const c10d::BarrierOptions& o) override {
    c10d::BarrierOptions opts = o;
    opts.device = std::nullopt;
    opts.device_ids.clear();
    return gloo->barrier(opts);
  }
};

}  // namespace npusim

PYBIND11_MODULE(covey_npusim, m) {
  using namespace npusim;
  m.def("register_hooks", [] { at::RegisterPrivateUse1HooksInterface(&hooks); });
  m.def("device_count", [] { return static_cast<int>(kNumDevices); });
  m.def("current_device", [] { return static_cast<int>(current_device); });
  m.def("set_device", [](int index) {
    TORCH_CHECK(0 <= index && index < kNumDevices, "npusim: there is no npu:", index);
    current_device = static_cast<DeviceIndex>(index);
  });
  m.def("bytes_now", [] { return bytes_now.load(); });
  m.def("bytes_peak", [] { return bytes_peak.load(); });
  m.def("reset_peak", [] { bytes_peak = bytes_now.load(); });
  m.def("default_generator", [](int index) { return default_generator(static_cast<DeviceIndex>(index)); });
  m.def("hccl", [](c10::intrusive_ptr<c10d::Backend> inner) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<Hccl>(std::move(inner));
  });
  m.def("add_rule", [](const std::string& op, std::vector<int> dtypes, bool refused, std::string why) {
    const std::lock_guard<std::mutex> guard(lock);
    std::vector<ScalarType> types;
    for (const int dtype : dtypes) types.push_back(static_cast<ScalarType>(dtype));
    rules[op].push_back({types, refused, std::move(why)});
  });
  m.def("reset_counts", [] {
    const std::lock_guard<std::mutex> guard(lock);
    counts.clear();
    fallbacks.clear();
  });
  m.def("counts", [] { return counts; });
  m.def("fallbacks", [] { return fallbacks; });
}
