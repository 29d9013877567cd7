"""The advice as the plain fields of `--json`. Pure."""

from typing import Any

import msgspec

from trainctl.protocol.advice.advice import Advice
from trainctl.protocol.advice.advice_facts import AdviceFacts
from trainctl.protocol.advice.plans import Plan


def advice_fields(advice: Advice, facts: AdviceFacts, notes: tuple[str, ...]) -> dict[str, Any]:
    """Each plan also says whether it fits and can run; docs/advise.md lists all fields."""
    plain: dict[str, Any] = msgspec.to_builtins(advice)
    run = facts.run
    return {
        **plain, "answer": _plan(advice.answer), "independent": _plan(advice.independent),
        "plans": [_plan(plan) for plan in advice.plans], "notes": notes,
        "run": {
            "file": run.file, "steps": run.steps, "global_batch": run.global_batch, "unit": run.unit,
            "tokens_per_sample": run.tokens_per_sample, "gradient_bytes": run.gradient_bytes,
            "parameters": run.parameters, "trained": run.trained, "currency": run.currency, "lead": run.lead,
        },
        "nodes": {node.name: _node(node) for node in facts.nodes},
    }  # fmt: skip


def _plan(plan: Plan | None) -> dict[str, Any] | None:
    if plan is None:
        return None
    plain: dict[str, Any] = msgspec.to_builtins(plan)
    fits, found = (*plan.memory, *plan.shared_memory), (*plain["memory"], *plain["shared_memory"])
    for fit, memory in zip(fits, found, strict=True):
        memory |= {"fits": fit.fits, "spare_bytes": fit.spare_bytes}
    return {**plain, "fits": plan.fits, "can_run": plan.can_run}


def _node(node: Any) -> dict[str, Any]:
    made = node.profile.created_at if node.profile is not None else None
    return {
        "device": node.device, "backend": node.backend, "machine": node.machine, "cores": node.cores,
        "threads": node.threads, "calibrated_at": made, "watts": node.watts, "price_per_hour": node.price_per_hour,
    }  # fmt: skip
