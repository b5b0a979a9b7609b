"""Operations and kernels with names as torch gives them, sorted into parts."""

from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

from nmt.profile.time_by_part import sum_kernels, sum_operations


def make_event(name: str, parent: FunctionEvent | None = None, own_us: int = 0) -> FunctionEvent:
    event = FunctionEvent(0, name, 1, 0, own_us)
    if parent is not None:
        event.set_cpu_parent(parent)
    return event


def in_microseconds(seconds: dict[str, float]) -> dict[str, int]:
    return {part: round(1e6 * took) for part, took in seconds.items() if took}


def test_operations_belong_to_what_they_ran_within() -> None:
    backward = "autograd::engine::evaluate_function: "
    update = make_event("update")
    attention = make_event("_PaddedAttention", update)
    loss = make_event("_FusedLoss", update)
    linear = make_event("aten::linear", update)
    step = make_event("Optimizer.step#Adam.step", update)
    fused_linear = make_event("_FusedLinear", update)
    attention_back = make_event(backward + "_CompiledAttentionBackward")
    product_back = make_event(backward + "MmBackward0")
    sums = make_event(backward + "torch::autograd::AccumulateGrad")
    events = [
        make_event("aten::mm", attention, 30),
        make_event("aten::bmm", attention_back, 60),
        make_event("aten::mm", loss, 4),
        make_event("aten::addmm", linear, 8),
        make_event("mkldnn::_linear_pointwise", fused_linear, 500),
        make_event("aten::mm", product_back, 100),
        make_event("aten::native_layer_norm", update, 2),
        make_event("aten::_fused_adam_", step, 32),
        make_event("aten::add_", sums, 16),
        make_event("aten::zeros", update, 1),
        make_event("aten::copy_", None, 1000),  # of another thread
    ]
    assert in_microseconds(sum_operations(events)) == {
        "attention": 90,
        "softmax and loss": 4,
        "matrix products": 608,
        "embedding, norm, dropout": 2,
        "optimizer": 32,
        "other": 17,
    }


def test_kernels_belong_to_the_part_that_they_are_named_after() -> None:
    """Names as CUPTI gives them on Hopper; a graph's kernels have no operation above them."""
    took_us = {
        "attention_backward": 8,
        "loss_rows_once": 4,
        "nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopA_NTN": 100,
        "sm80_xmma_gemm_bf16bf16_bf16f32_f32_tn_n": 10,
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevK": 7,
        "triton_per_fused_add_native_dropout_native_layer_norm_packed_attention_3": 20,
        "Memcpy DtoD": 1,
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>": 5,
    }
    step, cuda = "Optimizer.step#Adam.step", DeviceType.CUDA
    events = [
        FunctionEvent(0, name, 1, 0, took, device_type=cuda) for name, took in took_us.items()
    ]
    events += [
        FunctionEvent(0, "update", 1, 0, 999, device_type=cuda),
        FunctionEvent(0, "mm", 1, 0, 999),
        FunctionEvent(0, step, 1, 0, 999, device_type=cuda, is_user_annotation=True),
    ]
    assert in_microseconds(sum_kernels(events)) == {
        "attention": 8,
        "softmax and loss": 4,
        "matrix products": 110,
        "sum over ranks": 7,
        "other": 1,
        "embedding, norm, dropout": 20,
        "optimizer": 5,
    }
