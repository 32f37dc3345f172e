"""Where in a completion the answer stands. Training and evaluation use the same functions."""

import re
from collections.abc import Mapping
from typing import Any

from grpo_lit.rollout import Completion, Prompt

_FIRST_TAG = re.compile(r"<(?:think|answer)>")
_BOX_OR_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|\\[{}]|[{}]")


def answer_text(prompt: Prompt, completion: Completion) -> str:
    """Return the completion together with the tags that the template wrote for it.

    A template that begins the answer with ``<think>`` leaves completions without that tag
    (:meth:`grpo_lit.data.template.PromptTemplate.render` notes what it wrote in ``metadata["prefill"]``).
    """
    return opened_tags(prompt.metadata) + completion.text


def opened_tags(metadata: Mapping[str, Any]) -> str:
    """Return what the template wrote from its first think or answer tag on; empty without one."""
    prefill = metadata.get("prefill", "")
    tag = _FIRST_TAG.search(prefill)
    return prefill[tag.start() :] if tag else ""


def last_tagged(text: str, tag: str = "answer") -> str | None:
    """Return what the last complete ``<tag>...</tag>`` holds; ``None`` without one."""
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, max(end, 0))
    return None if start < 0 else text[start + len(tag) + 2 : end]


def last_boxed(text: str) -> str | None:
    r"""Return what the last complete ``\boxed{...}`` or ``\fbox{...}`` holds; ``None`` without one.

    Braces inside may nest, escaped ones count for nothing, and a box that never closes is no box. One pass.
    """
    content = None
    opened: list[int | None] = []  # where the content of each open box begins; None for a plain brace
    for match in _BOX_OR_BRACE.finditer(text):
        token = match.group()
        if token == "}":
            start = opened.pop() if opened else None
            if start is not None:
                content = text[start : match.start()]
        elif token == "{":
            opened.append(None)
        elif token not in (r"\{", r"\}"):
            opened.append(match.end())
    return content


def after_hashes(text: str) -> str | None:
    """Return the rest of the line after the last ``####``, as GSM8K marks its answers; ``None`` without one."""
    start = text.rfind("####")
    return None if start < 0 else text[start + 4 :].lstrip("#").partition("\n")[0].strip()


def balanced(text: str) -> bool:
    r"""Return whether every brace that opens closes again, escaped ones apart."""
    depth = 0
    for match in _BOX_OR_BRACE.finditer(text):
        if match.group() in (r"\{", r"\}"):
            continue
        depth += -1 if match.group() == "}" else 1
        if depth < 0:
            return False
    return depth == 0


def last_line(text: str) -> str | None:
    """Return the last line that is not blank; ``None`` without one."""
    stripped = text.rstrip()
    return stripped[stripped.rfind("\n") + 1 :].strip() or None
