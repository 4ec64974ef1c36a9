"""Greedy texts on the page: where each leaves the reference's."""

from typing import Any

from calib.eval.variants import REFERENCE

_SUMMARY = 80  # characters of a folded prompt


def texts(report: dict[str, Any]) -> list[dict[str, Any]]:
    """One entry per prompt: the subject beside the reference, and all others."""
    written = report["texts"]["continuations"]
    name = report["subject"]
    if name not in written:
        return []
    others = [each for each in written if each not in (REFERENCE, name)]
    return [
        {
            "prompt": prompt,
            "heading": _heading(written[name][i]),
            "start": " ".join(prompt.split())[:_SUMMARY],
            "reference": _reference(written[REFERENCE][i], written[name][i]),
            "subject": written[name][i],
            "others": [(other, written[other][i]) for other in others],
        }
        for i, prompt in enumerate(report["texts"]["prompts"])
    ]


def _reference(reference: dict[str, Any], other: dict[str, Any]) -> dict[str, str]:
    """The reference's text, cut where `other` leaves it."""
    whole = reference["same"] + reference["rest"]
    return {"same": other["same"], "rest": whole.removeprefix(other["same"])}


def _heading(text: dict[str, Any]) -> str:
    count = text["same_tokens"]
    if not text["rest"]:
        return f"all {count} tokens are the same"
    if count == 0:
        return "the first token is another"
    return f"token {count + 1} is the first that is another"
