"""Arithmetic of device memory: how many bytes a token of a pass takes.

Counted is what autograd keeps of a layer in transformers' own code, tensor by tensor, and what the layer at work makes
besides. On an H200 (Qwen2.5-VL-7B, bfloat16, 4 groups of 3,120 tokens, no optimizer) 111 GiB were measured without
checkpointing and 33 with it; weights and this arithmetic make 110 and 28, gradients of 15 not counted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from foveal.config.schema_model import Checkpointing

LEAST = 256
"""Tokens of the smallest budget of a pass; an answer that is longer goes alone."""


@dataclass(frozen=True)
class Block:
    """Sizes of a decoder layer or of a block of the vision tower.

    Attributes:
        count: how many there are.
        width: of the hidden states.
        queries, keys: of all query heads together, and of all key heads.
        inner: columns inside the MLP, those of all experts that a token is sent to together.
        gated: the MLP multiplies two products (SwiGLU).
        head_norms: queries and keys are normalised.
        copies: times that a token is copied out to experts.
    """

    count: int
    width: int
    queries: int
    keys: int
    inner: int
    gated: bool = True
    head_norms: bool = False
    copies: int = 0


@dataclass(frozen=True)
class Pass:
    """How a pass computes.

    Attributes:
        stream: bytes of a number in the residual stream: 4 for float32 weights, also under autocast, else 2.
        compute: bytes of a number that a matrix product takes.
        keys_per_token: keys that attention is given for each token; above 1 where a prompt's are gathered for each
            answer.
        visual: part of the tokens that stand for pictures.
        checkpointing: of the model's layers.
        offload: what waits for the backward pass waits in host memory.
        rank: of the adapters on all linear layers; 0 for none.
        compiled: layers keep what products need, and no copies on the way to it.
    """

    stream: int
    compute: int
    keys_per_token: float = 1.0
    visual: float = 0.0
    checkpointing: Checkpointing = False
    offload: bool = False
    rank: int = 0
    compiled: bool = False


def decoder_block(config: Any) -> Block:
    """The decoder layers that a model's configuration describes."""
    text = config.get_text_config()
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    experts = getattr(text, "num_experts_per_tok", 0) if getattr(text, "num_experts", 0) else 0
    return Block(
        count=text.num_hidden_layers,
        width=text.hidden_size,
        queries=text.num_attention_heads * head,
        keys=text.num_key_value_heads * head,
        inner=experts * text.moe_intermediate_size if experts else text.intermediate_size,
        head_norms=text.model_type.startswith("qwen3"),
        copies=experts,
    )


def tower_block(config: Any) -> Block | None:
    """The blocks of the vision tower, None for a text model."""
    vision = getattr(config, "vision_config", None)
    if vision is None:
        return None
    is_first = vision.model_type.startswith("qwen2_vl")  # whose `hidden_size` is the decoder's
    width = vision.embed_dim if is_first else vision.hidden_size
    inner = int(width * vision.mlp_ratio) if is_first else vision.intermediate_size
    return Block(vision.depth, width, queries=width, keys=width, inner=inner, gated="qwen2_5" in vision.model_type)


def kept_by_layer(block: Block, how: Pass) -> float:
    """Bytes for each token that autograd keeps of one layer without checkpointing."""
    norm = block.width * (how.stream if how.compiled else 4 + how.stream)  # the input (in float32), the result
    # What the products are given: one tensor for all, or, where it must be cast, one for each.
    products = 2 if how.compiled or how.stream == how.compute else 5 if block.gated else 3
    given = how.compute * products * block.width
    attention = how.compute * (2 * block.queries + 2 * block.keys * how.keys_per_token)  # queries, result; keys, values
    if block.head_norms:
        attention += ((0 if how.compiled else 4) + how.compute) * (block.queries + block.keys)
    inner = (4 if block.gated else 2) - how.compiled  # what the activation made is made again
    mlp = how.compute * block.inner * inner
    experts = how.compute * 2 * block.copies * block.width  # copies of the token, and what comes back
    adapters = how.compute * how.rank * (7 if block.gated else 6)  # what A makes of the token, for each product
    return 2 * norm + given + attention + mlp + experts + adapters


def waiting_bytes(config: Any, how: Pass, *, tower_trained: bool) -> float:
    """Bytes of each token that wait for the backward pass, the last hidden states and their gradient included.

    Args:
        tower_trained: as in `training_bytes`.
    """
    decoder = decoder_block(config)
    tower = _tower_bytes(config, how, _waiting) if tower_trained else 0.0
    return 2 * how.stream * decoder.width + _waiting(decoder, how) + tower


def backward_bytes(config: Any, how: Pass, *, tower_trained: bool) -> float:
    """Bytes for each token beside those that wait while a layer's backward pass runs, where they are most: what was
    computed again or fetched for it, and the gradients of its widest numbers.

    Args:
        tower_trained: as in `training_bytes`.
    """
    tower = _tower_bytes(config, how, _backward) if tower_trained else 0.0
    return max(_backward(decoder_block(config), how), tower)


def layer_forward_bytes(config: Any, how: Pass) -> float:
    """Bytes of each token at the widest place of a pass without gradient: what goes in, the stream, and the MLP's
    numbers with what it is given. `forward_bytes` is a bound of it."""
    tower = _tower_bytes(config, how, _at_work)
    return how.stream * decoder_block(config).width + max(_at_work(decoder_block(config), how), tower)


def training_bytes(config: Any, how: Pass, *, tower_trained: bool) -> float:
    """Bytes that each token of a forward and backward pass takes: what waits for the backward pass, and, twice, the
    layer at work, for its gradients.

    Args:
        config: of a transformers model.
        tower_trained: whether the vision tower is; of one that isn't, nothing is kept.
    """
    decoder = decoder_block(config)
    head = 2 * how.stream * decoder.width  # last hidden states with their gradient
    return head + _trained(decoder, how) + _tower_bytes(config, how, _trained if tower_trained else _untrained)


def forward_bytes(config: Any, how: Pass) -> float:
    """Bytes that each token of a pass without gradient takes."""
    decoder = decoder_block(config)
    return how.stream * decoder.width + _untrained(decoder, how) + _tower_bytes(config, how, _untrained)


def head_bytes(elements: int, *, compiled: bool) -> int:
    """Bytes of the logits of one chunk of tokens: in float32 themselves, their logarithms, probabilities and products,
    and as many gradients; compiled in 16 bits, themselves and a gradient."""
    return 2 * 2 * elements if compiled else 4 * 8 * elements


def budget(free: float, per_token: float, most: int) -> int:
    """Tokens of the largest pass: nine tenths of the free bytes, in whole `LEAST`, and no more than `most`."""
    return min(most, max(LEAST, int(0.9 * free / per_token) // LEAST * LEAST))


def _trained(block: Block, how: Pass) -> float:
    return _waiting(block, how) + 2 * kept_by_layer(block, how)


def _waiting(block: Block, how: Pass) -> float:
    if how.offload:
        return 0.0
    again = {False: 0, "selective": block.count // 2, True: block.count}[how.checkpointing]
    return again * how.stream * block.width + (block.count - again) * kept_by_layer(block, how)


def _backward(block: Block, how: Pass) -> float:
    made = kept_by_layer(block, how) if how.checkpointing or how.offload else 0.0
    widest = how.compute * (block.inner * (1 if how.compiled else 2) + block.copies * block.width)
    return made + widest + 2 * how.stream * block.width


def _at_work(block: Block, how: Pass) -> float:
    given = block.width * (how.compute if how.compiled or how.stream == 2 else 4 + how.compute)
    inner = how.compute * block.inner * ((2 if block.gated else 1) + (not how.compiled))
    return how.stream * block.width + given + inner + how.compute * 2 * block.copies * block.width


def _untrained(block: Block, how: Pass) -> float:
    return how.stream * block.width + kept_by_layer(block, how)


def _tower_bytes(config: Any, how: Pass, of: Any) -> float:
    block = tower_block(config)
    if block is None:
        return 0.0
    patches = config.vision_config.spatial_merge_size**2
    # Its attention gathers no keys; trained and checkpointed, it is not compiled.
    alone = replace(how, keys_per_token=1.0, visual=0.0, compiled=how.compiled and not how.checkpointing)
    return float(how.visual * patches * of(block, alone))
