"""What the bits are: every contract, as a plain torch function and as an object with a name.

A contract says which addends are summed, in which tree, in which precision, and where the result is rounded. The
functions in this file are the definition, and also the CPU executor; every faster path (a Triton kernel, the NVLink
switch, a training mirror) names the contract it implements and is tested to give these bits.

RN32 below is IEEE 754 rounding to nearest, ties to even, into fp32.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from bicomm.as_written import as_written, needs_gradient, rounded_sum

Addends = Sequence[Tensor] | Tensor
Rule = Literal["ordered", "exact", "window", "owner", "fp64"]

RULES: tuple[Rule, ...] = ("ordered", "exact", "window", "owner", "fp64")
WINDOW_LIMIT = 512  # keeps 2**(A - t) a normal fp64 number for every fp32 exponent

# ---------------------------------------------------------------------------------------------------- the exact sum
#
# fp32 addends, held in fp64, are cut into slices at fixed multiples of 2**lo: h = (x + c) - c with c = 1.5 * 2**(52 +
# lo) rounds x to a multiple of 2**lo, and x - h, at most 2**(lo - 1), goes on to the next slice. A slice is 47 bits
# wide, so that the sum of 121 of them has no rounding error in any order. Carries then move upwards with the same
# trick, so that slice j is at most half a unit of slice j - 1 (without them [-128, 64, 64, 2**-33, 2**-60] is wrong),
# and the slices are folded from the bottom, rounding to odd, which makes the one final rounding the right one.

_SLICES = (101, 54, 7, -40, -87, -134, -149)
_BLOCK = 120  # addends between two carry passes
_CHUNK = {"cpu": 1 << 14, "cuda": 1 << 22}  # columns at a time: 8 x 16 Ki fp64 stay in a core's L2 (0.3 s against 12 s)


def _add_round_to_odd(a: Tensor, b: Tensor) -> Tensor:
    """a + b in fp64, rounded to odd: an inexact sum gets an odd last bit, so that a later rounding is never double."""
    s = a + b
    v = s - a
    error = (a - (s - v)) + (b - v)
    bits = s.view(torch.int64)
    toward = torch.where((error > 0) == (s > 0), 1, -1)
    return torch.where((error != 0) & (bits & 1 == 0), bits + toward, bits).view(torch.float64)


def _magnitude(x: Tensor) -> float:
    low, high = torch.aminmax(x)
    return max(-low.item(), high.item())


def _is_zero(x: Tensor) -> bool:
    flat = x.view(-1)  # no square of a multiple of 2**-149 underflows in fp64; a dot product is the fastest test
    return torch.dot(flat, flat).item() == 0.0


def _split(x: Tensor, top: float, sums: dict[int, Tensor]) -> None:
    """Add the columns of x (fp64 [N, n], at most `top`, N <= 120; used up) to the sums, slice by slice, exactly."""
    h = torch.empty_like(x)
    for lo in _SLICES:
        if top <= 2.0 ** (lo - 1):  # every h would be zero
            continue
        if lo == _SLICES[-1]:
            h = x
        else:
            c = 1.5 * 2.0 ** (52 + lo)
            torch.add(x, c, out=h).sub_(c)
            x.sub_(h)
        total = h.sum(0)
        sums[lo] = sums[lo] + total if lo in sums else total
        if h is x or _is_zero(x):
            return


def _carry(sums: dict[int, Tensor]) -> list[Tensor]:
    """Make every slice at most half a unit of the one above; the slices from the lowest to the highest in use."""
    used = [lo for lo in _SLICES if max(sums) >= lo >= min(sums)]
    for lo in used:
        sums.setdefault(lo, torch.zeros_like(sums[max(sums)]))
    for above, lo in reversed(list(itertools.pairwise(used))):
        c = 1.5 * 2.0 ** (52 + above)
        h = (sums[lo] + c).sub_(c)
        sums[lo].sub_(h)
        sums[above].add_(h)
    return [sums[lo] for lo in reversed(used)]


def _exact_f64(x: Tensor) -> Tensor:
    """The exact column sums of x (fp64 [N, n] holding fp32 values; used up), rounded to odd into fp64."""
    plain, top = None, _magnitude(x)
    if not math.isfinite(top):
        plain = x.sum(0)  # the IEEE fold of NaN and infinities; finite fp32 addends cannot overflow it
        x.masked_fill_(~torch.isfinite(plain), 0.0)
        top = _magnitude(x)
    sums: dict[int, Tensor] = {}
    if x.shape[0] > _BLOCK:  # a slice above the highest one in use, to take its carries: 300 addends of 2**46 units do
        above_top = [lo for lo in _SLICES if top <= 2.0 ** (lo - 1)]  # not fit into 53 bits
        if above_top:
            sums[above_top[-1]] = x.new_zeros(x.shape[1])
    for block in x.split(_BLOCK):
        _split(block, top, sums)
        if x.shape[0] > _BLOCK and sums:
            _carry(sums)
    if sums:
        result, *rest = _carry(sums)
        for above in rest:
            result = _add_round_to_odd(above, result)
    else:
        result = x.new_zeros(x.shape[1])
    return result if plain is None else torch.where(torch.isfinite(plain), result, plain)


def _window_f64(x: Tensor, g: int, t: int, s: int) -> Tensor:
    """The same sum seen through a fixed-point window: see :func:`window`."""
    largest = x.abs().amax(0)
    exponent = ((largest.view(torch.int64) >> 52) - 1023).clamp_(min=-126, max=128)
    anchor = -torch.div(-exponent, g, rounding_mode="floor") * g
    unit = ((anchor - t + 1023) << 52).view(torch.float64)
    smallest = ((anchor - s + 1023) << 52).view(torch.float64)
    total = _exact_f64((x / unit).trunc_().mul_(unit))
    return torch.where(total.abs() < smallest, 0.0, total)


# -------------------------------------------------------------------------------------------------------- the rules


def _checked(addends: Addends) -> list[Tensor]:
    if isinstance(addends, Tensor) and addends.dim() == 0:
        raise ValueError("expected addends [N, ...] or a list of N tensors, got a tensor without dimensions")
    rows = list(addends.unbind(0)) if isinstance(addends, Tensor) else list(addends)
    if not rows:
        raise ValueError("a sum needs at least one addend: expected [N, ...] with N >= 1, got N = 0")
    for i, row in enumerate(rows):
        if row.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise TypeError(f"addend {i} is {row.dtype}: contracts are defined on fp32 (or bf16, fp16) addends")
        if row.shape != rows[0].shape:
            raise ValueError(f"addend {i} has shape {tuple(row.shape)}, addend 0 has {tuple(rows[0].shape)}")
        if row.device != rows[0].device:
            raise ValueError(f"addend {i} is on {row.device}, addend 0 on {rows[0].device}: expected one device")
    return rows


def _refuse_flushed_subnormals(device: torch.device) -> None:
    # torch.set_flush_denormal(True) changes bits: subnormal addends would be read as zero.
    if device.type == "cpu" and torch.tensor(2.0**-149, dtype=torch.float32, device="cpu").double().item() == 0.0:
        raise RuntimeError(
            "this thread flushes subnormals (torch.set_flush_denormal(True)), and bicomm's contracts keep them: "
            "call torch.set_flush_denormal(False) before a combine"
        )


def canonical_nan_(x: Tensor) -> Tensor:
    """Make every NaN of x the canonical one, in place: 0x7fc00000 in fp32, 0x7fc0 in bf16."""
    return x.masked_fill_(torch.isnan(x), float("nan"))


def round_output(x: Tensor, out: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """Round an fp32 result to `out_dtype` (fp32 or bf16), canonical NaN; into `out`, whose dtype then decides.

    Raises ValueError where `out` has another shape, TypeError for any other dtype.
    """
    if out is not None and out.shape != x.shape:
        raise ValueError(f"out has shape {tuple(out.shape)}, the result {tuple(x.shape)}")
    dtype = out_dtype if out is None else out.dtype
    if dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(f"a result is torch.float32 or torch.bfloat16, got {dtype}")
    result = torch.empty(x.shape, dtype=out_dtype, device=x.device) if out is None else out
    return canonical_nan_(result.copy_(x))


def _by_chunks(addends: Addends, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """RN32 of `reduce` over fp64 copies [N, n] of the addends, n columns at a time."""

    def run(rows: list[Tensor]) -> Tensor:
        flat = [row.reshape(-1) for row in rows]
        out = torch.empty(rows[0].shape, dtype=torch.float32, device=rows[0].device)
        result = out.view(-1)
        step = _CHUNK.get(out.device.type, 1 << 22)
        for start in range(0, out.numel(), step):
            stop = min(start + step, out.numel())
            x = torch.empty(len(flat), stop - start, dtype=torch.float64, device=out.device)
            for i, row in enumerate(flat):
                x[i].copy_(row[start:stop])
            result[start:stop].copy_(reduce(x)).add_(0.0)  # -0 becomes +0
        return out

    return _summed(addends, run)


def _summed(addends: Addends, run: Callable[[list[Tensor]], Tensor]) -> Tensor:
    rows = _checked(addends)
    _refuse_flushed_subnormals(rows[0].device)
    return rounded_sum(lambda: canonical_nan_(run(rows)), *rows)


@as_written
def ordered(addends: Addends) -> Tensor:
    """acc = +0; for r = 0..N-1: acc = RN32(acc + addend_r).

    addends: N tensors of one shape (fp32, bf16 or fp16), or one tensor [N, ...]. Returns fp32 of that shape. Every
    addend's gradient is the result's, cast to its type: roundings count as the identity.
    Raises TypeError for another dtype, ValueError for no addends or unequal shapes.
    """

    def chain(rows: list[Tensor]) -> Tensor:
        out = rows[0].to(torch.float32) + 0.0
        for row in rows[1:]:
            out += row
        return out

    return _summed(addends, chain)


@as_written
def exact(addends: Addends) -> Tensor:
    """RN32(addend_0 + ... + addend_{N-1}): one rounding of the exact real sum. Arguments as for :func:`ordered`.

    A NaN, or infinities of both signs, gives NaN; infinities of one sign that infinity; a zero is +0.
    """
    return _by_chunks(addends, _exact_f64)


@as_written
def window(addends: Addends, g: int, t: int, s: int) -> Tensor:
    """The exact sum seen through a fixed-point window. Arguments as for :func:`ordered`, special values as `exact`.

    e is the largest exponent among the addends (that of a subnormal or zero is -126) and A = g * ceil(e / g). Each
    addend is truncated toward zero below 2**(A - t); the sum of these is exact; it is +0 if its magnitude is below
    2**(A - s), else RN32 of it. One public PTX emulator reports that a GB200 NVLink switch is window(16, 95, 86).
    """
    _check_window((g, t, s))
    return _by_chunks(addends, lambda x: _window_f64(x, g, t, s))


@as_written
def owner(addends: Addends) -> Tensor:
    """RN32 of the exact sum of one token's expert rows: :func:`exact`, where an addend is a row of a top-k slot."""
    return exact(addends)


@as_written
def fp64(addends: Addends) -> Tensor:
    """acc = +0 in fp64; for r = 0..N-1: acc = acc + addend_r; one rounding to fp32. Arguments as for `ordered`.

    This is Megatron-LM's mirror of the NVLink switch. It equals `exact` while the exponents of the addends span at
    most 29 - ceil(log2 N) binades, and depends on the order of the addends beyond.
    """

    def chain(x: Tensor) -> Tensor:
        acc = x[0] + 0.0
        for i in range(1, x.shape[0]):
            acc += x[i]
        return acc

    return _by_chunks(addends, chain)


def _check_window(parameters: tuple[int, ...]) -> None:
    if len(parameters) != 3 or not all(isinstance(p, int) and not isinstance(p, bool) for p in parameters):
        raise ValueError(f"a window takes three integers (g, t, s), got {parameters!r}")
    g, t, s = parameters
    if not (1 <= g <= 128 and 1 <= s <= t <= WINDOW_LIMIT):
        raise ValueError(f"a window needs 1 <= g <= 128, 1 <= s <= t <= {WINDOW_LIMIT}, got (g, t, s) = {parameters}")


# ---------------------------------------------------------------------------------------------------------- objects


@dataclasses.dataclass(frozen=True)
class Partial:
    """The tree within a rank: how the rows that one token's experts made on one rank become its fp32 partial.

    order        "slot": ascending top-k slot; "expert": ascending local expert index.
    accumulator  "exact" (one rounding to fp32 at the end), "fp64" (a chain, one rounding to fp32), "fp32" or "bf16"
                 (a chain that rounds at each addition). Chains start from +0.
    probability  where the router's weight enters: "activation" (inside the expert, so that the sum here is plain) or
                 "combine" (each addend is the product weight * row).
    product      of "combine": the product is rounded to "fp32", to fp32 and then "bf16", or with "fma" not at all
                 before its addition (one fused rounding; only with an fp32 accumulator).
    weight       of "combine": the weight is rounded to this type before the product, "fp32" or "bf16".
    """

    order: Literal["slot", "expert"] = "slot"
    accumulator: Literal["exact", "fp64", "fp32", "bf16"] = "exact"
    probability: Literal["activation", "combine"] = "activation"
    product: Literal["fp32", "bf16", "fma"] = "fp32"
    weight: Literal["fp32", "bf16"] = "fp32"

    def __post_init__(self) -> None:
        for field, allowed in _PARTIAL_VALUES.items():
            if getattr(self, field) not in allowed:
                raise ValueError(f"Partial.{field} is one of {', '.join(allowed)}; got {getattr(self, field)!r}")
        if self.probability == "activation" and (self.product, self.weight) != ("fp32", "fp32"):
            raise ValueError("Partial.product and weight describe a weight in the combine: set probability='combine'")
        if self.product == "fma" and self.accumulator != "fp32":
            raise ValueError(f"product='fma' needs accumulator='fp32' (one fused rounding), got {self.accumulator!r}")

    @property
    def id(self) -> str:
        """Every field, spelled: `slot-fp64-activation/1`, `slot-fp32-combine-fma-fp32/1`."""
        words: list[str] = [self.order, self.accumulator, self.probability]
        if self.probability == "combine":
            words += [self.product, self.weight]
        return "-".join(words) + "/1"


_PARTIAL_VALUES: dict[str, tuple[str, ...]] = {
    "order": ("slot", "expert"),
    "accumulator": ("exact", "fp64", "fp32", "bf16"),
    "probability": ("activation", "combine"),
    "product": ("fp32", "bf16", "fma"),
    "weight": ("fp32", "bf16"),
}


@dataclasses.dataclass(frozen=True)
class Contract:
    """A cross-rank rule and, where it matters, the tree within a rank. Frozen, hashable, equal by value.

    rule        one of ordered, exact, window, owner, fp64: the function of that name in this module.
    parameters  (g, t, s) of a window; empty otherwise.
    partial     the tree within a rank. A combine looks at the rule only; a mirror needs both.

    An engine stores `contract.json()` beside its rollouts; a trainer reads it with `Contract.from_json`.
    """

    rule: Rule
    parameters: tuple[int, ...] = ()
    partial: Partial | None = None

    def __post_init__(self) -> None:
        try:  # a list would make it unequal and unhashable
            object.__setattr__(self, "parameters", tuple(self.parameters))
        except TypeError:
            raise TypeError(f"a contract's parameters are a tuple of integers, got {self.parameters!r}") from None
        if self.rule not in RULES:
            raise ValueError(f"unknown rule {self.rule!r}: contracts are {', '.join(RULES)}")
        if self.rule == "window":
            _check_window(self.parameters)
        elif self.parameters:
            raise ValueError(f"{self.rule} takes no parameters, got {self.parameters!r}")
        if not (self.partial is None or isinstance(self.partial, Partial)):
            raise TypeError(f"a contract's partial is a Partial or None, got {self.partial!r}")

    @property
    def id(self) -> str:
        """A readable name that `Contract.parse` reads back: `exact/1`, `window(16,95,86)/1`, `ordered/1+slot-.../1`."""
        arguments = f"({','.join(map(str, self.parameters))})" if self.parameters else ""
        inner = "" if self.partial is None else f"+{_partial_name(self.partial)}"
        return f"{self.rule}{arguments}/1{inner}"

    @property
    def cross_rank(self) -> Contract:
        """The same rule without a tree within the rank: what a combine compares."""
        return self if self.partial is None else dataclasses.replace(self, partial=None)

    @as_written
    def sum(self, addends: Addends, *, out: Tensor | None = None, out_dtype: torch.dtype = torch.float32) -> Tensor:
        """The contract's sum of N addends of one shape: fp32, or rounded once more to bf16 on request.

        addends: N tensors, or one tensor [N, ...]; fp32 (bf16 and fp16 are widened). out: where to put the result;
        its dtype, fp32 or bf16, decides. Gradients as for :func:`ordered`; ValueError for `out` where one is asked for.
        """
        if out is not None and needs_gradient(_checked(addends)):
            raise ValueError("out= cannot be used with gradients: the result is a new tensor")
        total = window(addends, *self.parameters) if self.rule == "window" else _FUNCTIONS[self.rule](addends)
        return total if out is None and out_dtype == torch.float32 else round_output(total, out, out_dtype)

    def json(self) -> str:
        """One line of JSON that says everything; equal contracts give equal strings."""
        record: dict[str, Any] = {"rule": self.rule, "version": 1}
        if self.parameters:
            record["parameters"] = list(self.parameters)
        if self.partial is not None:
            record["partial"] = dataclasses.asdict(self.partial)
        return json.dumps(record, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Contract:
        """Read what `json()` wrote. Raises ValueError for other text, naming the part that is wrong."""
        if not isinstance(text, str | bytes):
            raise TypeError(f"expected the text that Contract.json() gave, got {type(text).__name__}")
        try:
            record = json.loads(text, object_pairs_hook=_without_repeats)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"a contract is a JSON object, got {text[:80]!r} ({error})") from error
        version = record.get("version") if isinstance(record, dict) else None
        if type(version) is not int or version != 1:
            raise ValueError(f"expected a contract object of version 1, got {text[:120]!r}")
        unknown = set(record) - {"rule", "version", "parameters", "partial"}
        if unknown:
            raise ValueError(f"unknown keys in a contract: {', '.join(sorted(unknown))}")
        partial, parameters = record.get("partial"), record.get("parameters", [])
        if not isinstance(parameters, list) or not (partial is None or isinstance(partial, dict)):
            raise ValueError(f"'parameters' is a list and 'partial' an object in a contract, got {text[:120]!r}")
        if partial is None:
            return cls(record.get("rule", ""), tuple(parameters))
        if set(partial) - set(_PARTIAL_VALUES):
            raise ValueError(f"unknown keys in 'partial': {', '.join(sorted(set(partial) - set(_PARTIAL_VALUES)))}")
        tree = Partial(**partial)
        if set(_PARTIAL_VALUES) - set(partial):  # a default here would be a guess at what the engine did
            raise ValueError(f"'partial' does not say: {', '.join(sorted(set(_PARTIAL_VALUES) - set(partial)))}")
        return cls(record.get("rule", ""), tuple(parameters), tree)

    @classmethod
    def parse(cls, text: str) -> Contract:
        """Read an id, or the short name of a rule or preset: `exact`, `window(16,95,86)`, `ordered/1+slot-.../1`."""
        from bicomm.presets import PRESETS, partial_named

        if not isinstance(text, str):
            raise TypeError(f"a contract's id is a string, got {type(text).__name__}")
        text = text.strip()
        if text in PRESETS:
            return PRESETS[text]
        match = re.fullmatch(r"([a-z0-9]+)(?:\((" + _NUMBERS + r")\))?(?:/1)?(?:\+(.+))?", text)
        if match is None or match[1] not in RULES:
            raise ValueError(f"unknown contract {text[:80]!r}: expected one of {', '.join(RULES)}, an id, or a preset")
        parameters = tuple(int(p) for p in match[2].split(",")) if match[2] else ()
        rule: Rule = match[1]
        return cls(rule, parameters, partial_named(match[3]) if match[3] else None)

    def __str__(self) -> str:
        return self.id


_NUMBERS = r" *[0-9]{1,9} *(?:, *[0-9]{1,9} *)*"


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    repeated = {name for name in names if names.count(name) > 1}
    if repeated:
        raise ValueError(f"said more than once: {', '.join(sorted(repeated))}")
    return dict(pairs)


_FUNCTIONS: dict[str, Callable[[Addends], Tensor]] = {"ordered": ordered, "exact": exact, "owner": owner, "fp64": fp64}


def _partial_name(partial: Partial) -> str:
    from bicomm.presets import name_of_partial

    return name_of_partial(partial)


ORDERED = Contract("ordered")
EXACT = Contract("exact")
OWNER = Contract("owner")
FP64 = Contract("fp64")
GB200_WINDOW = Contract("window", (16, 95, 86))
