"""Compiled layers compute what the eager ones do, with few graphs, and give way where compiling fails."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._inductor.exc import InductorError
from torch._subclasses.fake_tensor import FakeTensorMode

from foveal.models import attention
from foveal.models.attention import Segments, text_attention
from foveal.models.compiling import Compiled, compile_layers
from foveal.train.layout import PromptLayouts
from foveal.train.scorer import TokenScorer
from foveal.train.scoring import Packer
from tests.rollout_models import tiny_model
from tests.test_train_meter import group

CPU = torch.device("cpu")
LENGTHS: list[list[tuple[int, ...]]] = [[(4, 2)], [(3, 3, 5), (7, 2)], [(6,), (1, 2)], [(2, 2, 2, 2)]]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """No graphs of other tests."""
    torch._dynamo.reset()
    Compiled.failed = False
    counters.clear()
    yield
    torch._dynamo.reset()


def twins(**options: Any) -> tuple[Any, Any]:
    """A model and its copy with compiled layers."""
    model: Any = tiny_model("qwen3_vl")
    compiled = copy.deepcopy(model)
    compile_layers(compiled, **{"vision": False, "backend": "eager", **options})
    return model, compiled


def pass_over(model: Any, lengths: list[tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Log-probabilities of packed groups with shared prompts, and all gradients."""
    layouts = PromptLayouts(model, lambda prompt: prompt.features or {})
    packer = Packer(budget=1000, shared_prefix=True, layouts=layouts, device=CPU)
    (pack,) = packer.packs([group(*answers) for answers in lengths])
    logprobs = TokenScorer(model, forbidden_ids=[], temperature=1.0, autocast=None)(pack).logprobs
    model.zero_grad()
    logprobs.sum().backward()
    return {"": logprobs.detach(), **{name: p.grad.clone() for name, p in model.named_parameters()}}


def assert_equal(model: Any, compiled: Any, packs: int = 4) -> None:
    for lengths in LENGTHS[:packs]:
        expected, found = pass_over(model, lengths), pass_over(compiled, lengths)
        for name, value in expected.items():
            assert (found[name] - value).norm() <= 1e-5 * value.norm(), (lengths, name)


def test_ever_new_lengths_share_two_graphs_without_a_break() -> None:
    assert_equal(*twins())
    assert counters["stats"]["unique_graphs"] <= 2
    assert not counters["graph_break"]


def test_checkpointed_layers_compile() -> None:
    model, compiled = twins(backend="aot_eager")
    for one in (model, compiled):
        one.train().gradient_checkpointing_enable({"use_reentrant": False})
    assert_equal(model, compiled, packs=2)
    assert counters["stats"]["unique_graphs"] <= 2


@pytest.mark.slow  # a minute of C++ compiling
def test_inductor_equals_eager() -> None:
    assert_equal(*twins(backend="inductor"), packs=2)


def test_blocks_of_the_vision_tower_compile_where_they_are_not_checkpointed() -> None:
    assert_equal(*twins(vision=True), packs=1)


def test_sampling_with_the_same_module_stays_eager() -> None:
    _, compiled = twins()
    with torch.no_grad():
        compiled(input_ids=torch.tensor([[7, 8, 9]]), use_cache=False)
    assert not counters["stats"]


def test_a_compiler_that_fails_is_one_warning_and_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no C++ compiler found")

    assert_equal(*twins(backend=broken), packs=2)
    warnings = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == 1
    assert "use_torch_compile" in warnings[0] and "no C++ compiler found" in warnings[0]


@pytest.mark.parametrize("dynamic", [True, None])
def test_a_backward_pass_that_cannot_be_compiled_shows_before_anything_has_run(
    dynamic: bool | None, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise InductorError(RuntimeError("no such kernel"), None)

    x = torch.ones(3, requires_grad=True)
    halved = Compiled(aot_autograd(fw_compiler=lambda graph, _: graph.forward, bw_compiler=broken)).wrap(
        lambda x: x.sin() * 2, dynamic=dynamic
    )
    halved(x).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, 2 * torch.ones(3).cos())
    assert "no such kernel" in capsys.readouterr().err and Compiled.failed


def test_an_error_of_the_model_itself_is_raised() -> None:
    _, compiled = twins()
    layer = compiled.model.language_model.layers[0]

    def fail(*args: Any) -> None:
        raise torch.OutOfMemoryError("out of memory")

    layer.mlp.register_forward_pre_hook(fail)
    with pytest.raises(torch.OutOfMemoryError):
        pass_over(compiled, LENGTHS[0])


def test_attention_on_a_gpu_is_one_graph_whatever_the_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced with tensors that only claim to be on a GPU, and to which nothing can be copied from pinned memory."""
    monkeypatch.setattr(attention, "to_device", torch.Tensor.to)
    graphs = []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def attend(query: torch.Tensor, key: torch.Tensor, segments: Segments) -> torch.Tensor:
        return text_attention(torch.nn.Module(), query, key, key, None, scaling=0.1, segments=segments)[0]

    traced = torch.compile(attend, dynamic=True, backend=keep, fullgraph=True)
    gpu = torch.device("cuda")
    shared = [((5, 3, 2), (-1, 0, 0)), ((7, 4, 2, 9), (-1, 0, 0, -1)), ((3, 2, 6, 4, 1), (-1, 0, 0, -1, 3))]
    with FakeTensorMode():
        for lengths, prefix in shared:
            segments = Segments(lengths, prefix, gpu)
            segments.prepare()
            query = torch.empty(1, 4, sum(lengths), 32, device=gpu, dtype=torch.bfloat16)
            assert traced(query, query[:, :2], segments).shape == (1, sum(lengths), 4, 32)
    assert len(graphs) <= 2
    assert any("varlen" in str(node.target) for node in graphs[-1].graph.nodes)
