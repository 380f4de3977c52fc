"""A short trial of the installed package, for every Python that it is built for: `python -W error tools/smoke.py`."""

from __future__ import annotations

import asyncio
import importlib.metadata
import sys

import numpy as np

import infinilm
from infinilm import _core

assert infinilm.__version__ == importlib.metadata.version("infinilm")
assert not any("emulated" in isa for isa in _core.cpu_isas())
assert "reason" in infinilm.backends()["cuda"]

with infinilm.LLM("demo") as llm:
    first, second = llm.generate(["Once upon a time", "The little fox"], temperature=0, max_tokens=20)
    text = first.outputs[0].text
    assert text and second.outputs[0].text
    assert "".join(event.text for event in llm.stream("Once upon a time", temperature=0, max_tokens=20)) == text
    (again,) = asyncio.run(llm.agenerate("Once upon a time", temperature=0, max_tokens=20))
    assert again.outputs[0].text == text
    try:
        llm.generate([[2**40]])
    except infinilm.RequestError:
        pass
    else:
        raise AssertionError("a token id beyond the vocabulary was taken")

tensor = infinilm.from_dlpack(np.arange(6, dtype=np.float32).reshape(2, 3))
assert np.array_equal(np.from_dlpack(tensor), np.arange(6).reshape(2, 3))
print(f"infinilm {infinilm.__version__}, Python {sys.version.split()[0]}, {_core.__file__}: well")
