"""Sites: the places of a model where a rule meets selected parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor, nn

from aftermap.curvature.attention import attention_sites
from aftermap.curvature.layers import LayerRule, find_rule
from aftermap.curvature.layout import Layout
from aftermap.params import named_parameters

__all__ = ["ROOT", "Site", "Sites", "find_sites"]

ROOT = "(model)"  # the name of a layer that is the whole model


@dataclass(frozen=True)
class Site:
    """A block of parameters with its rule. Modules that share all of its parameters share the site.

    Attributes:
        name: path of the first module (``encoder.0.attn.in_proj`` for a part of one).
        rule: how calls are read.
        named: role -> (parameter name, parameter); only selected parameters.
        layout: how they form a block.
    """

    name: str
    rule: LayerRule
    named: dict[str, tuple[str, Tensor]]
    layout: Layout

    @cached_property
    def reads_inputs(self) -> bool:
        """Whether the block depends on a call's input: not where only a bias is selected."""
        return set(self.named) != {"bias"}


@dataclass(frozen=True)
class Sites:
    """What was found in a model.

    Attributes:
        sites: in the order of the model's modules.
        hooked: (module, site number) for every module whose calls are recorded by a hook.
        attention: (module, {part: site number}) for every multi-head attention.
        reasons: for each selected parameter that no rule covers, why.
    """

    sites: list[Site] = field(default_factory=list)
    hooked: list[tuple[nn.Module, int]] = field(default_factory=list)
    attention: list[tuple[nn.MultiheadAttention, dict[str, int]]] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)

    def by_parameter(self) -> dict[str, list[int]]:
        """For each covered parameter the numbers of its sites: more than one where it is tied across kinds of layers."""
        found: dict[str, list[int]] = {}
        for number, site in enumerate(self.sites):
            for name in site.layout.names:
                found.setdefault(name, []).append(number)
        return found


def find_sites(model: nn.Module, names: Sequence[str], *, batch_statistics: bool = False) -> Sites:
    """Finds every module that owns selected parameters and gives each a rule, or a reason why it has none.

    Args:
        model: any module.
        names: the selected parameters.
        batch_statistics: also take BatchNorm layers that normalise with the statistics of the batch (training): their
            rule then reads those statistics as constants.
    """
    parameters = named_parameters(model)
    selected = {id(parameters[n]): n for n in names}
    found = Sites()
    known: dict[tuple[object, ...], int] = {}
    inside_attention: set[str] = set()
    for path, module in model.named_modules():
        if any(path.startswith(prefix) for prefix in inside_attention):
            continue
        if isinstance(module, nn.MultiheadAttention) and type(module).forward is nn.MultiheadAttention.forward:
            inside_attention.add(f"{path}." if path else "")
            parts: dict[str, int] = {}
            for part, (rule, paths) in attention_sites(module).items():
                owned = {role: _attribute(module, where) for role, where in paths.items()}
                number = _add(found, known, f"{path}.{part}".lstrip("."), rule, module, owned, selected)
                if number is not None:
                    parts[part] = number
            found.attention.append((module, parts))
            continue
        own = {k: p for k, p in module._parameters.items() if p is not None and id(p) in selected}
        if not own:
            continue
        candidate = find_rule(module)
        why = f"no rule for {type(module).__name__}" if candidate is None else candidate.unsupported(module)
        if batch_statistics and candidate is not None and isinstance(module, nn.modules.batchnorm._BatchNorm):
            why = None
        if candidate is None or why is not None:
            found.reasons.update({selected[id(p)]: str(why) for p in own.values()})
            continue
        number = _add(found, known, path, candidate, module, {k: own.get(k) for k in candidate.roles}, selected)
        if number is not None:
            found.hooked.append((module, number))
    covered = found.by_parameter()
    for name in names:
        if name in covered:
            found.reasons.pop(name, None)
        else:
            found.reasons.setdefault(name, "no rule covers this parameter of its module")
    return found


def _add(
    found: Sites,
    known: dict[tuple[object, ...], int],
    path: str,
    rule: LayerRule,
    module: nn.Module,
    owned: dict[str, Tensor | None],
    selected: dict[int, str],
) -> int | None:
    named = {role: (selected[id(p)], p) for role, p in owned.items() if p is not None and id(p) in selected}
    if not named:
        return None
    name = path or ROOT
    layout = rule.layout(name, module, named)
    shape = (layout.groups, layout.out, layout.in_)  # a weight may be tied between convolutions with other groups
    key = (type(rule), shape, *((role, id(p)) for role, (_, p) in named.items()))
    if key not in known:
        known[key] = len(found.sites)
        found.sites.append(Site(name, rule, named, layout))
    return known[key]


def _attribute(module: nn.Module, path: str) -> Tensor | None:
    value: object = module
    for part in path.split("."):
        value = getattr(value, part, None)
    return value if isinstance(value, Tensor) else None
