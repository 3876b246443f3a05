"""Attention on TPU by JAX's splash attention kernels, and its gradient, with block sizes of their own.

Notation: batch B, queries T, keys S, query heads N, key and value heads K, head width H.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from tokamax._src import errors, registry, shapes
from tokamax._src.bound_arguments import BoundArguments
from tokamax._src.op import Op
from tokamax._src.ops import tpu
from tokamax._src.ops.dot_product_attention import base, splash
from tokamax._src.ops.dot_product_attention.base import DotProductAttention


def _check_blocks(config: Any, whole: str, part: str) -> None:
    for field in dataclasses.fields(config):
        block = getattr(config, field.name)
        if block is not None and (block <= 0 or block % tpu.LANES):
            raise errors.ArgumentError(f"{field.name} must be a positive multiple of {tpu.LANES}, got {block}")
    if getattr(config, whole) % getattr(config, part):
        raise errors.ArgumentError(
            f"{part} must divide {whole}={getattr(config, whole)}, got {getattr(config, part)}; try {tpu.LANES}"
        )


@dataclasses.dataclass(frozen=True)
class PallasMosaicTpuAttentionConfig:
    """Blocks of the forward pass, each a multiple of 128.

    Attributes:
      block_q: queries of a block.
      block_kv: keys that are loaded at once.
      block_kv_compute: keys that are computed at once; it divides `block_kv`.
    """

    block_q: int = 128
    block_kv: int = 128
    block_kv_compute: int = 128

    def __post_init__(self) -> None:
        """Checks that the kernels take them."""
        _check_blocks(self, "block_kv", "block_kv_compute")


@dataclasses.dataclass(frozen=True)
class PallasMosaicTpuAttentionVjpConfig:
    """Blocks of the backward pass, each a multiple of 128: one kernel for keys and values, one for queries.

    Attributes:
      block_q_dkv: queries of a block of the kernel for keys and values.
      block_kv_dkv: keys that it loads at once.
      block_kv_dkv_compute: keys that it computes at once; it divides `block_kv_dkv`.
      block_q_dq: queries of a block of the kernel for queries; None where the first kernel computes all gradients.
      block_kv_dq: keys of such a block; None likewise.
    """

    block_q_dkv: int = 128
    block_kv_dkv: int = 128
    block_kv_dkv_compute: int = 128
    block_q_dq: int | None = 128
    block_kv_dq: int | None = 128

    def __post_init__(self) -> None:
        """Checks that the kernels take them."""
        _check_blocks(self, "block_kv_dkv", "block_kv_dkv_compute")
        if (self.block_q_dq is None) != (self.block_kv_dq is None):
            raise errors.ArgumentError(
                f"block_q_dq and block_kv_dq must both be set or both be None, got {self.block_q_dq} and "
                f"{self.block_kv_dq}"
            )


Config = PallasMosaicTpuAttentionConfig
VjpConfig = PallasMosaicTpuAttentionVjpConfig


def _check_supported(arguments: dict[str, Any]) -> None:
    for name in ("bias", "mask"):
        if arguments[name] is not None:
            raise errors.UnsupportedError(
                f"{name} must be None for the Mosaic TPU kernel, got {shapes.spec_of(arguments[name])}; use "
                "implementation='xla_chunked', or is_causal, local_window_size, lengths and segment ids in place of it"
            )
    tpu.check_placed(*(arguments[name] for name in ("query", "key", "value")))
    tpu.check_dtypes(**{name: shapes.spec_of(arguments[name]) for name in ("query", "key", "value")})


@dataclasses.dataclass(frozen=True)
class _Call:
    """A call in the terms of the kernels.

    Attributes:
      inputs: what they read.
      window: which keys a query sees.
      statics: scale and soft cap.
      real_rows: bool `[B,1,T,1]`, which queries lie within their sequence; None for all.
    """

    inputs: splash.Inputs
    window: splash.Window
    statics: base.Statics
    real_rows: jax.Array | None

    @classmethod
    def of(
        cls,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        *,
        scale: float | None,
        is_causal: bool,
        query_seq_lengths: jax.Array | None,
        key_value_seq_lengths: jax.Array | None,
        local_window_size: tuple[int, int] | None,
        logits_soft_cap: float | None,
        query_segment_ids: jax.Array | None,
        key_value_segment_ids: jax.Array | None,
    ) -> "_Call":
        statics = base.Statics.of(query, scale, is_causal, local_window_size, logits_soft_cap)
        q, k, v = map(base.heads_first, (query, key, value))
        t, s = q.shape[2], k.shape[2]
        q_ids, k_ids = query_segment_ids, key_value_segment_ids
        if key_value_seq_lengths is not None:
            q_ids = jnp.zeros((q.shape[0], t), jnp.int32) if q_ids is None else q_ids
            k_ids = splash.hidden_beyond(k_ids, key_value_seq_lengths, s)
        real = None
        if query_seq_lengths is not None:
            real = (jnp.arange(t)[None] < query_seq_lengths[:, None])[:, None, :, None]
        scaled = (q.astype(jnp.float32) * statics.scale).astype(q.dtype)
        inputs = splash.Inputs(scaled, k, v, q_ids, k_ids)
        return cls(inputs, splash.Window(statics.left, statics.right), statics, real)

    @property
    def may_have_dead_rows(self) -> bool:
        """Whether some query may see no key."""
        t, s = self.inputs.q.shape[2], self.inputs.k.shape[2]
        return self.inputs.q_ids is not None or self.window.may_hide_a_row(t, s)

    def only_real(self, x: jax.Array) -> jax.Array:
        """Sets rows beyond the length of their sequence to zero, `[B,N,T,H]`."""
        return x if self.real_rows is None else jnp.where(self.real_rows, x, jnp.zeros((), x.dtype))

    def average(self, like: jax.Array) -> jax.Array:
        """The average of all values, `[B,N,1,H]`: what a query that sees no key gets."""
        mean = self.inputs.v.astype(jnp.float32).mean(2, keepdims=True)
        return jnp.repeat(mean, like.shape[1] // mean.shape[1], axis=1).astype(like.dtype)


class _Splash:
    """What the forward and the backward pass have in common."""

    interpret: bool

    supported_on = tpu.supported_on

    def _example_arguments(self, arguments: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        made = base.example_arguments(arguments, rng)
        for name in ("query_segment_ids", "key_value_segment_ids"):
            if (spec := arguments[name]) is not None:
                made[name] = np.sort(rng.integers(0, 4, spec.shape), axis=-1).astype(spec.dtype)
        return made


def _block_bytes(ba: BoundArguments, rows: int) -> tuple[int, int, int]:
    """Returns what a block of rows takes: in the dtype of the query, in f32, and as one f32 for each row and lane."""
    query = ba.abstract["query"]
    width = query.shape[-1]
    return (
        tpu.padded_bytes((rows, width), query.dtype),
        tpu.padded_bytes((rows, width), np.float32),
        tpu.padded_bytes((rows, tpu.LANES), np.float32),
    )


def _logits_bytes(rows: int, columns: int) -> int:
    """Returns what the logits that are computed at once take at least.

    Most of them stay in registers: a fourth is the least that was found for blocks of 1024 and more, by the limits at
    which the compiler for v5e (libtpu 0.0.52) begins to take a config.
    """
    return rows * columns * np.dtype(np.float32).itemsize // 4


def _sequence_blocks(size: int, largest: int) -> list[int]:
    """Returns blocks worth trying for a sequence: doublings of 128, and the whole of it if it is short."""
    whole = tpu.round_up(size, tpu.LANES)
    return sorted({*tpu.powers_of_two(tpu.LANES, min(whole, largest)), *([whole] if whole <= largest else [])})


def _parts(block: int) -> list[int]:
    """Returns what to compute at once of a block of keys."""
    return [part for part in sorted({256, 512, 1024, block}) if part <= block and block % part == 0]


@registry.register("dot_product_attention_vjp", "mosaic")
@dataclasses.dataclass(frozen=True)
class PallasMosaicTpuAttentionVjp(_Splash, Op[..., Any, Any, Any, Any]):
    """The gradient of attention by JAX's splash attention kernels (Pallas Mosaic), for TPU."""

    config_cls: ClassVar[type] = VjpConfig

    interpret: bool = dataclasses.field(default=False, kw_only=True)

    def bind(self, residuals: Any, out: Any, dout: Any, *args: Any, **kwargs: Any) -> BoundArguments:
        """Binds what the forward pass returned, the gradient of its output, and its arguments.

        Raises:
          ArgumentError: if the residuals are those of another implementation.
          UnsupportedError: if the kernel does not take the arguments.
        """
        if not shapes.is_array(residuals) or len(residuals.shape) != 3:
            raise errors.ArgumentError(
                f"residuals must be one f32 [B,N,T], as PallasMosaicTpuAttention returns them, got {residuals!r:.80}"
            )
        bound = super().bind(residuals, out, dout, *args, **kwargs)
        _check_supported(dict(bound.arguments))
        return bound

    def _fwd(
        self,
        residuals: jax.Array,
        out: jax.Array,
        dout: jax.Array,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        bias: None = None,
        mask: None = None,
        *,
        scale: float | None = None,
        is_causal: bool = False,
        query_seq_lengths: jax.Array | None = None,
        key_value_seq_lengths: jax.Array | None = None,
        local_window_size: tuple[int, int] | None = None,
        logits_soft_cap: float | None = None,
        query_segment_ids: jax.Array | None = None,
        key_value_segment_ids: jax.Array | None = None,
        return_residuals: bool,
        config: VjpConfig,
    ) -> tuple[dict[str, Any], None]:
        call = _Call.of(
            query,
            key,
            value,
            scale=scale,
            is_causal=is_causal,
            query_seq_lengths=query_seq_lengths,
            key_value_seq_lengths=key_value_seq_lengths,
            local_window_size=local_window_size,
            logits_soft_cap=logits_soft_cap,
            query_segment_ids=query_segment_ids,
            key_value_segment_ids=key_value_segment_ids,
        )
        dout = call.only_real(base.heads_first(dout))
        averaged = None
        if call.may_have_dead_rows:
            dead = splash.is_dead(residuals)
            averaged = jnp.where(dead[..., None], dout, jnp.zeros((), dout.dtype)).sum(2, dtype=jnp.float32)
            dout = jnp.where(dead[..., None], jnp.zeros((), dout.dtype), dout)
            residuals = jnp.where(dead, 0.0, residuals)
        dq, dk, dv = splash.backward(
            call.inputs,
            call.window,
            logits_soft_cap,
            base.heads_first(out),
            residuals,
            dout,
            interpret=self.interpret,
            **dataclasses.asdict(config),
        )
        if averaged is not None:  # [B,N,H]: the heads of a key head side by side.
            b, heads, s, h = dv.shape
            dv = dv + averaged.reshape(b, heads, -1, h).sum(2)[:, :, None] / s
        dq = dq.astype(jnp.float32) * call.statics.scale
        return {
            "query": base.heads_last(dq, query),
            "key": base.heads_last(dk, key),
            "value": base.heads_last(dv, value),
        }, None

    def _reference(
        self,
        residuals: jax.Array,
        out: jax.Array,
        dout: jax.Array,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        bias: None = None,
        mask: None = None,
        **more: Any,
    ) -> dict[str, Any]:
        run = lambda query, key, value: _plain(query, key, value, **more)  # noqa: E731
        return dict(zip(("query", "key", "value"), jax.vjp(run, query, key, value)[1](dout), strict=True))

    def vmem_bytes(self, ba: BoundArguments, config: VjpConfig) -> int:
        """Returns what a config takes of the vector memory at least: that of its kernels which takes more.

        Blocks are there twice, sums once.
        """
        q, _, _ = _block_bytes(ba, config.block_q_dkv)
        kv, kv_sums, _ = _block_bytes(ba, config.block_kv_dkv)
        fused = config.block_q_dq is None
        of_keys = 2 * (2 * q + 4 * kv) + 2 * kv_sums + (2 * q if fused else 0)
        of_keys += _logits_bytes(config.block_q_dkv, config.block_kv_dkv_compute)
        if config.block_q_dq is None or config.block_kv_dq is None:
            return of_keys
        (q, q_sums, _), (kv, _, _) = (_block_bytes(ba, rows) for rows in (config.block_q_dq, config.block_kv_dq))
        logits = _logits_bytes(config.block_q_dq, config.block_kv_dq)
        return max(of_keys, 2 * (3 * q + 2 * kv) + q_sums + logits)

    def _is_feasible(self, ba: BoundArguments, config: VjpConfig) -> bool:
        return self.vmem_bytes(ba, config) <= tpu.kernel_vmem_bytes()

    def _get_heuristics_config(self, ba: BoundArguments) -> VjpConfig:
        q, kv = _default_blocks(ba)
        return VjpConfig(q, kv, kv, q, kv)

    def _get_autotuning_configs(self, ba: BoundArguments) -> set[VjpConfig]:
        """Both kernels are independent: each pair of blocks of the second one meets few of the first."""
        t, s = ba.abstract["query"].shape[-3], ba.abstract["key"].shape[-3]
        rows, columns = (_sequence_blocks(size, 2048)[-4:] for size in (t, s))
        first = [(q, kv, part) for q in rows for kv in columns for part in _parts(kv) if part >= min(512, kv)]
        fused = {VjpConfig(*blocks, None, None) for blocks in first}
        default = self._get_heuristics_config(ba)
        q, kv = default.block_q_dq, default.block_kv_dq
        other = {VjpConfig(*blocks, q, kv) for blocks in first}
        best = (default.block_q_dkv, default.block_kv_dkv, default.block_kv_dkv_compute)
        return {*fused, *other, *(VjpConfig(*best, *blocks) for blocks in itertools.product(rows, columns))}

    def _example_arguments(self, arguments: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        """Residuals and output are those of the plain form at random queries, keys and values."""
        op = PallasMosaicTpuAttention(interpret=self.interpret)
        forward = functools.partial(op._fwd, return_residuals=True, config=Config())
        return base.example_gradient_arguments(arguments, super()._example_arguments(arguments, rng), forward, rng)


def _default_blocks(ba: BoundArguments) -> tuple[int, int]:
    """Returns 512 x 512, as in MaxText, less for short sequences."""
    t, s = ba.abstract["query"].shape[-3], ba.abstract["key"].shape[-3]
    q, kv = (min(512, tpu.round_up(size, tpu.LANES)) for size in (t, s))
    return q, kv


def _plain(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: None = None,
    mask: None = None,
    *,
    query_segment_ids: jax.Array | None = None,
    key_value_segment_ids: jax.Array | None = None,
    **more: Any,
) -> jax.Array:
    mask = base.with_segments(mask, query_segment_ids, key_value_segment_ids)
    return DotProductAttention()._fwd(query, key, value, bias, mask, **more, return_residuals=False, config=None)[0]


@registry.register("dot_product_attention", "mosaic")
@dataclasses.dataclass(frozen=True)
class PallasMosaicTpuAttention(_Splash, Op[..., Any, Any, Any, Any]):
    """Attention by JAX's splash attention kernels (Pallas Mosaic), for TPU.

    It takes bf16 and f32, causal and windowed attention, grouped heads, lengths, segment ids and soft caps, but neither
    bias nor mask. Its residuals are the logarithm of the sum of the exponentials of each row's logits, f32 `[B,N,T]`.

    Attributes:
      interpret: whether to run the kernel as plain XLA, on any device: slow, for tests without a TPU.
    """

    config_cls: ClassVar[type] = Config

    interpret: bool = dataclasses.field(default=False, kw_only=True)
    vjp: Callable[..., Any] | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        """The gradient of a kernel in interpret mode is in interpret mode."""
        if self.vjp is None:
            object.__setattr__(self, "vjp", PallasMosaicTpuAttentionVjp(interpret=self.interpret))

    def bind(
        self,
        query: Any,
        key: Any,
        value: Any,
        bias: None = None,
        mask: None = None,
        *,
        query_segment_ids: Any = None,
        key_value_segment_ids: Any = None,
        return_residuals: bool = False,
        **more: Any,
    ) -> BoundArguments:
        """Binds arguments; see `tokamax.dot_product_attention`.

        Raises:
          ArgumentError: if they do not fit each other.
          UnsupportedError: if the kernel does not take them.
        """
        canonical = dict(DotProductAttention().bind(query, key, value, bias, mask, **more).arguments)
        _check_supported(canonical)
        base.check_segments(query, key, query_segment_ids, key_value_segment_ids)
        canonical |= {"query_segment_ids": query_segment_ids, "key_value_segment_ids": key_value_segment_ids}
        return super().bind(**canonical, return_residuals=return_residuals)

    def bind_vjp(self, ba: BoundArguments) -> BoundArguments:
        """Returns the abstract arguments with which the gradient of a call binds its VJP op.

        Args:
          ba: bound arguments of this op, without vmap axes.
        """
        op = self.vjp if isinstance(self.vjp, Op) else PallasMosaicTpuAttentionVjp(interpret=self.interpret)
        query = ba.abstract["query"]
        batch = query.shape[0] if query.ndim == 4 else 1
        residuals = shapes.ArraySpec((batch, query.shape[-2], query.shape[-3]), jnp.float32)
        return op.bind(residuals, query, query, **ba.abstract)

    def _fwd(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        bias: None = None,
        mask: None = None,
        *,
        scale: float | None = None,
        is_causal: bool = False,
        query_seq_lengths: jax.Array | None = None,
        key_value_seq_lengths: jax.Array | None = None,
        local_window_size: tuple[int, int] | None = None,
        logits_soft_cap: float | None = None,
        query_segment_ids: jax.Array | None = None,
        key_value_segment_ids: jax.Array | None = None,
        return_residuals: bool,
        config: Config,
    ) -> tuple[jax.Array, jax.Array | None]:
        call = _Call.of(
            query,
            key,
            value,
            scale=scale,
            is_causal=is_causal,
            query_seq_lengths=query_seq_lengths,
            key_value_seq_lengths=key_value_seq_lengths,
            local_window_size=local_window_size,
            logits_soft_cap=logits_soft_cap,
            query_segment_ids=query_segment_ids,
            key_value_segment_ids=key_value_segment_ids,
        )
        out, logsumexp = splash.forward(
            call.inputs,
            call.window,
            logits_soft_cap,
            with_logsumexp=return_residuals or call.may_have_dead_rows,
            interpret=self.interpret,
            **dataclasses.asdict(config),
        )
        if call.may_have_dead_rows:
            assert logsumexp is not None
            out = jnp.where(splash.is_dead(logsumexp)[..., None], call.average(out), out)
        return base.heads_last(call.only_real(out), query), logsumexp if return_residuals else None

    def _reference(self, query: jax.Array, key: jax.Array, value: jax.Array, *args: Any, **more: Any) -> jax.Array:
        return _plain(query, key, value, *args, **more)

    def vmem_bytes(self, ba: BoundArguments, config: Config) -> int:
        """Returns what a config takes of the vector memory at least: blocks twice, the sums of rows once, logits."""
        q, sums, of_row = _block_bytes(ba, config.block_q)
        kv, _, _ = _block_bytes(ba, config.block_kv)
        logits = _logits_bytes(config.block_q, config.block_kv_compute)
        return 2 * (2 * q + 2 * kv) + sums + 2 * of_row + logits

    def _is_feasible(self, ba: BoundArguments, config: Config) -> bool:
        return self.vmem_bytes(ba, config) <= tpu.kernel_vmem_bytes()

    def _get_heuristics_config(self, ba: BoundArguments) -> Config:
        q, kv = _default_blocks(ba)
        return Config(q, kv, kv)

    def _get_autotuning_configs(self, ba: BoundArguments) -> set[Config]:
        t, s = ba.abstract["query"].shape[-3], ba.abstract["key"].shape[-3]
        blocks: Iterable[tuple[int, int]] = itertools.product(_sequence_blocks(t, 2048), _sequence_blocks(s, 4096))
        return {Config(q, kv, part) for q, kv in blocks for part in _parts(kv)}
