"""What a model that is trained takes of a GPU: what rests, and what its passes take besides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal, TypeAlias

from foveal.cluster.room import gradient_size, moment_bytes, shards, weight_bytes
from foveal.config import Config
from foveal.config.schema_model import TrainedConfig
from foveal.models.feature_store import DEVICE_BYTES
from foveal.models.head import CHUNK_ELEMENTS
from foveal.models.loading import DTYPES
from foveal.models.memory import Pass, backward_bytes, head_bytes, layer_forward_bytes, waiting_bytes
from foveal.plan.gpus import Gpu
from foveal.plan.rows import Lengths, Packed, pack
from foveal.plan.sizes import ModelSizes
from foveal.train.budget import MOST, compiles_head, how_computed, largest_passes
from foveal.train.sharding import WHOLE_SHARE

Role: TypeAlias = Literal["actor", "critic"]
Parts: TypeAlias = dict[str, float]


class Trained:
    """A model that is trained, as one GPU holds it.

    Attributes:
        weights, moments, gradients: bytes of the GPU, and on_host: of the host's memory for it.
        gathered_whole: bytes of all weights that other GPUs have parts of, in the type that is computed in.
    """

    def __init__(
        self, config: Config, gpu: Gpu, lengths: Lengths, role: Role, keys: TrainedConfig, sizes: ModelSizes
    ) -> None:
        self.config, self.gpu, self.lengths = config, gpu, lengths
        self.role, self.keys, self.sizes = role, keys, sizes
        devices = self.devices = config.training_devices
        spread = shards(keys.fsdp, devices)
        self.sharded = devices > 1
        self.size = DTYPES[keys.weights_dtype("cuda")].itemsize
        mixed = DTYPES[keys.fsdp.mp_param_dtype].itemsize
        self.compute = mixed if self.sharded or self.size == 4 else self.size
        self.stream = self.compute if self.sharded else self.size
        self.reduce = DTYPES[keys.fsdp.mp_reduce_dtype].itemsize
        whole = sizes.whole if self.sharded else 0
        self.gathered_whole = float(self.compute * (sizes.parameters - whole + sizes.adapters))
        self.weights = weight_bytes(keys, sizes.parameters - whole, sizes.adapters) / spread
        self.moments = moment_bytes(keys, sizes.trained) / spread
        self.gradients = sizes.trained * gradient_size(keys) / spread
        self.on_host = 0.0
        if keys.fsdp.enable_cpu_offload and self.sharded:
            self.on_host = self.weights + self.moments + self.gradients
            self.weights = self.moments = self.gradients = 0.0
        self.weights += whole * self.compute
        if self.sharded and sums_at_end(keys, sizes, gpu):
            self.gradients = float(sizes.trained * self.reduce)
        self.layer = sizes.layer
        self.compiled = config.worker.actor.use_torch_compile

    def budgets(self, free: float) -> tuple[int, int]:
        """Tokens of passes with gradient and without; of `auto` with gradient those that it settles at.

        Args:
            free: bytes beside what rests and gradients.
        """
        config = self.config
        wanted, longest = config.worker.actor.token_budget, config.data.max_sequence_length
        if isinstance(wanted, int):
            return wanted, wanted
        if wanted == "easyr1":
            micro = self.keys.micro_batch_size_per_device_for_update
            return micro * longest, self.keys.micro_batch_size_per_device_for_experience * longest
        if self.sizes.sees and not self.sizes.tower_trained:
            free -= DEVICE_BYTES
        how = how_computed(config, self.keys, self.sizes.config, stream=self.stream, compute=self.compute)
        _, forward, _ = largest_passes(
            config,
            self.sizes.config,
            how,
            free - sum(self._gathered(summed=False).values()),
            parameters=self.sizes.parameters,
            tower_trained=self.sizes.tower_trained,
        )
        update = largest_tokens(self._taken, free, margin=0.9 / 1.1)
        return max(update, 256), forward

    def _taken(self, tokens: int) -> float:
        return sum(self.update_parts(tokens).values()) - self.gradients

    def packed(self, tokens: int, *, update: bool) -> Packed:
        """The groups of an optimizer step on this GPU, or of the whole step, in passes of up to `tokens`."""
        config = self.config
        prompts = min(self.keys.global_batch_size, config.data.rollout_batch_size)
        prompts = prompts if update else config.data.rollout_batch_size
        workers = max(self.devices // self.keys.ulysses_size, 1)
        return pack(config, self.lengths, -(-prompts // workers), tokens)

    def how(self, packed: Packed) -> Pass:
        config = self.config
        how = how_computed(config, self.keys, self.sizes.config, stream=self.stream, compute=self.compute)
        # Each device of those that share a sequence runs the tower over all of its pictures.
        visual = packed.visual * self.keys.ulysses_size
        return replace(how, visual=visual, keys_per_token=packed.keys_per_token, compiled=self.compiled)

    def forward_parts(self, tokens: int, held_in: int = 0) -> tuple[Parts, int]:
        """What a pass without gradient takes beside what rests, and the tokens of the largest.

        Args:
            held_in: bytes of a weight, where another model of this size is read.
        """
        packed = self.packed(tokens, update=False)
        largest = max(packed.first, packed.later) // self.keys.ulysses_size
        # Compiled, a layer's copies end with it where nothing waits for a backward pass.
        how, casts = self.how(packed), self.casts(forward=not self.compiled, kept=0.0)
        if held_in == self.compute:
            how, casts = replace(how, stream=held_in), {}
        layers = largest * layer_forward_bytes(self.sizes.config, how)
        states = largest * self.sizes.text.hidden_size * how.stream
        logits = self._logits(packed, largest) / 2
        common = casts | self._gathered(summed=False)
        if layers > states + logits:
            return common | {"activations": layers}, largest
        return common | {"activations": states, "logits": logits}, largest

    def update_parts(self, tokens: int) -> Parts:
        """What an update takes beside what rests, at its peak."""
        packed = self.packed(tokens, update=True)
        return max(self._moments_of_update(packed), key=lambda parts: sum(parts.values()))

    def _moments_of_update(self, packed: Packed) -> Iterator[Parts]:
        """What is there when most may be: in the first pass, which finds no gradients; in a later one; at the end."""
        sizes, how = self.sizes, self.how(packed)
        size = self.compute if self.sharded else gradient_size(self.keys)
        head_trained = self.role == "actor" and not sizes.adapters and "language" not in self.keys.model.frozen_parts
        of_head = sizes.embedding * (size + self.compute + self.compute * (self.stream != self.compute))
        waiting = waiting_bytes(sizes.config, how, tower_trained=sizes.tower_trained)
        backward = backward_bytes(sizes.config, how, tower_trained=sizes.tower_trained)
        trained_share = sizes.trained / max(sizes.parameters, 1)
        for tokens, gradients in ((packed.first, 0.0), (packed.later, self.gradients)):
            tokens //= self.keys.ulysses_size
            if not tokens:
                continue
            common = {"gradients": gradients} | self._gathered()
            wait = tokens * waiting
            logits = self._logits(packed, tokens)
            yield common | self.casts(forward=True) | {"activations": wait, "logits": logits / 2}
            at_head = logits + of_head * head_trained
            yield common | self.casts(forward=False) | {"activations": wait, "logits": at_head}
            of_layer = self.layer * size * trained_share
            yield common | self.casts(forward=False) | {"activations": wait + tokens * backward + of_layer}
        embeddings = sizes.embedding * size * (2 if sizes.tied else 1) * (not sizes.adapters)
        yield {"gradients": self.gradients, "activations": float(embeddings)} | self._gathered()

    def _logits(self, packed: Packed, tokens: int) -> float:
        if self.role == "critic":
            return 0.0
        config = self.config
        compiled = compiles_head(config)
        rows = int(packed.scored * tokens) * self.sizes.text.vocab_size
        elements = min(CHUNK_ELEMENTS["compiled" if compiled else "cuda"], rows)
        both = 1.5 if config.algorithm.exact_kl_in_loss else 1.0  # the reference's as well
        return both * head_bytes(elements, compiled=compiled)

    def casts(self, *, forward: bool, kept: float | None = None) -> Parts:
        """Copies of float32 weights in the type of matrix products: eager layers' stay until a forward pass ends, and
        what a layer that isn't computed again was given stays until its backward pass.

        Args:
            kept: weights whose copies do, where there is no such pass.
        """
        if self.stream == self.compute:
            return {}
        if kept is None:
            again = {False: 0.0, "selective": 0.5, True: 1.0}[self.keys.model.enable_gradient_checkpointing]
            kept = (1 - again) * self.sizes.parameters
        if forward:
            kept = max(kept, 0.0 if self.compiled else self.sizes.parameters)
        return {"casts": self.compute * max(kept, self.layer + self.sizes.embedding)}

    def _gathered(self, *, summed: bool = True) -> Parts:
        """Weights of other GPUs: all of them, or a layer's while it runs, the next one's with them, and what stays
        gathered; and the layer's gradients on their way to the others."""
        if not self.sharded:
            return {}
        trained_share = self.sizes.trained / self.sizes.parameters
        sums = (self.layer + self.sizes.embedding) * self.reduce * trained_share * summed
        if gathers_once(self.keys, self.sizes, self.gpu):
            return {"gathered": self.gathered_whole + sums}
        return {"gathered": self.compute * (2 * self.layer + self.sizes.embedding) + sums}


def sums_at_end(keys: TrainedConfig, sizes: ModelSizes, gpu: Gpu) -> bool:
    """Whether gradients wait, whole, for an optimizer step's last pass (`fsdp.gradient_sync`)."""
    chosen = keys.fsdp.gradient_sync
    fits = sizes.trained * DTYPES[keys.fsdp.mp_reduce_dtype].itemsize <= WHOLE_SHARE * gpu.bytes
    return fits if chosen == "auto" else chosen == "last"


def gathers_once(keys: TrainedConfig, sizes: ModelSizes, gpu: Gpu) -> bool:
    """Whether weights stay gathered until an optimizer step or a pass without gradient ends (`fsdp.gather_weights`)."""
    fsdp = keys.fsdp
    if fsdp.gather_weights != "auto" or not fsdp.enable_full_shard:
        return fsdp.gather_weights == "step" or not fsdp.enable_full_shard
    whole = (sizes.parameters + sizes.adapters) * DTYPES[fsdp.mp_param_dtype].itemsize
    return not fsdp.enable_cpu_offload and whole <= WHOLE_SHARE * gpu.bytes


def largest_tokens(taken: Callable[[int], float], free: float, margin: float = 1.0) -> int:
    """The largest pass, in whole 256s, that takes no more than `margin` of the free bytes; 0 where none does."""
    low, high = 0, MOST // 256
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if taken(256 * middle) <= margin * free else (low, middle - 1)
    return 256 * low
