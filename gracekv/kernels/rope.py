r"""Rotary position embedding as a table, and its exact inverse.

The rotation of position t is the pair (cos_t, sin_t) that the model used at prefill, after
any scaling of frequencies (llama3, yarn, linear ...) and including the attention factor s that
yarn-like schemes multiply into both. With n_t = cos_t^2 + sin_t^2 = s^2 the inverse of

    rope(x, t)    = x cos_t + rotate_half(x) sin_t        is
    unrope(y, t)  = y cos_t / n_t - rotate_half(y) sin_t / n_t .

Source: Eq. (T1) (R and R^-1); the s^2 normalisation is ours.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from gracekv.errors import ShapeError
from gracekv.kernels.uploads import on_device, stream_of


@dataclass(frozen=True, slots=True, eq=False)
class Rope:
    """The rotations of positions 0..T-1.

    Attributes:
        cos: [T, d_rot] float32, with equal halves (Hugging Face layout).
        sin: [T, d_rot] float32.
        interleaved: which features rotate together: 2i and 2i + 1 (GLM-4) if True, else i and i +
            d_rot/2.

    Only the first d_rot of a head's d features rotate (partial rotary if d_rot < d). The table and
    the tensors that it rotates may be on different devices.

    Raises:
        ShapeError: cos and sin have different shapes, or an odd d_rot.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool = False
    _moved: dict[tuple[int, ...], Rope] = field(default_factory=dict, init=False, repr=False)
    _both: Tensor | None = field(default=None, repr=False)  # cos and sin, if stored together

    def __post_init__(self) -> None:
        if self.cos.ndim != 2 or self.cos.shape != self.sin.shape or self.cos.shape[1] % 2:
            raise ShapeError(
                f"Rope takes cos and sin of one shape [T, even d_rot]; got {tuple(self.cos.shape)} "
                f"and {tuple(self.sin.shape)}."
            )

    @classmethod
    def of_theta(
        cls, length: int, dim: int, theta: float = 10_000.0, device: torch.device | None = None
    ) -> Rope:
        """Plain RoPE with base `theta` for positions 0..length-1 and head dimension `dim`."""
        inverse = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim)
        angle = torch.outer(torch.arange(length, dtype=torch.float64, device=device), inverse)
        angle = torch.cat([angle, angle], dim=-1)
        return cls(angle.cos().float(), angle.sin().float())

    @classmethod
    def none(cls, length: int, device: torch.device | None = None) -> Rope:
        """No rotation, for the positions 0..length-1 of a layer without RoPE."""
        sin = torch.zeros(length, 2, device=device, dtype=torch.float32)
        return cls(torch.ones_like(sin), sin)

    def rotate(self, x: Tensor, positions: Tensor | None, out: Tensor | None = None) -> Tensor:
        """R(t) x for x [..., n, d] and positions [n] (or broadcastable to x's [..., n]).

        None stands for positions 0..n-1, the whole table. The result is written to `out` [..., n,
        d] if given, in its dtype; it must not overlap x.
        """
        out = torch.empty_like(x) if out is None else out
        return _apply(x, *self._at(positions, out), out, self.interleaved)

    def unrotate(self, x: Tensor, positions: Tensor, out: Tensor | None = None) -> Tensor:
        """R(t)^-1 x, the key before rotation, for x [..., n, d]; arguments as in `rotate`."""
        out = torch.empty_like(x) if out is None else out
        cos, sin = self._at(positions, out)
        norm = cos * cos + sin * sin
        return _apply(x, cos / norm, -sin / norm, out, self.interleaved)

    def moved(self, positions: Tensor | slice, to: int | Tensor) -> Rope:
        """R(to) R(t)^-1 for each position t of int64 [n] or a slice: a table of n rows.

        `to` is one position for all, or int64 [n]. For a slice, which takes one position, the table
        is computed once for all layers.
        """
        if isinstance(positions, slice):
            # Per stream: another stream could read it before it is computed.
            key = positions.start, positions.stop, int(to), stream_of(self.cos.device)
            if key not in self._moved:
                self._moved[key] = self._moved_rows(positions, to)
            return self._moved[key]
        return self._moved_rows(on_device(positions, self.cos.device), to)

    def _moved_rows(self, positions: Tensor | slice, to: int | Tensor) -> Rope:
        cos, sin = self.cos[positions], self.sin[positions]
        norm = cos.square() + sin.square()
        last_cos, last_sin = self.cos[to], self.sin[to]
        turned = [last_cos * cos + last_sin * sin, last_sin * cos - last_cos * sin]
        both = torch.stack(turned).div_(norm)
        return Rope(both[0], both[1], self.interleaved, both)

    def double(self) -> Rope:
        """The table in float64, for references."""
        return Rope(self.cos.double(), self.sin.double(), self.interleaved)

    def in_halves(self, dim: int) -> tuple[Rope, Tensor | None]:
        """The same rotations with features i and i + d_rot/2 as pairs, for kernels that read those.

        Also returns int64 [dim], the features in that order, or None if they already are: rotating
        x and then indexing by it equals indexing and then rotating with the returned table.
        """
        if not self.interleaved:
            return self, None
        rotary = self.cos.shape[1]
        order = torch.arange(dim, device=self.cos.device)
        order[:rotary] = order[:rotary].view(-1, 2).T.flatten()
        return Rope(self.cos, self.sin), order

    def _at(self, positions: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of the table, on x's device and in its dtype."""
        cos, sin = self.cos, self.sin
        if positions is not None:
            # A model on several devices has only one table.
            positions = on_device(positions, cos.device)
            both = self._both
            cos, sin = (cos[positions], sin[positions]) if both is None else both[:, positions]
        return cos.to(x.device, x.dtype), sin.to(x.device, x.dtype)


def _apply(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor, interleaved: bool) -> Tensor:
    """x cos + rotate_half(x) sin, half by half, without a temporary of x's size."""
    rotary = cos.shape[-1]
    low, high = slice(0, rotary // 2), slice(rotary // 2, rotary)
    # Both halves of the table are equal.
    own_sin = sin[..., low]
    if interleaved:
        cos = cos[..., low].repeat_interleave(2, dim=-1)
        low, high = slice(0, rotary, 2), slice(1, rotary, 2)
    torch.mul(x[..., :rotary], cos, out=out[..., :rotary])
    out[..., low].addcmul_(x[..., high], own_sin, value=-1.0)
    out[..., high].addcmul_(x[..., low], own_sin)
    if rotary < x.shape[-1]:
        out[..., rotary:] = x[..., rotary:]
    return out
