"""The hypothesis profiles.

"default" has few examples, and "thorough" many, and all combinations (covering.py). "sanitizers" has the fewest, for
code that is several times slower: every combination still meets a size that is not the simplest, which is the first.
"""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings

# Examples are large arrays made from a seed: slow to make by hypothesis' measure, and too_slow would say so.
_base = settings(
    deadline=None,
    derandomize=False,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
# Without shrinking a failure is reported at once; its shapes and seed are small as drawn. Thorough shrinks.
_phases = (Phase.explicit, Phase.reuse, Phase.generate)
settings.register_profile("default", _base, max_examples=5, phases=_phases)
settings.register_profile("sanitizers", _base, max_examples=2, phases=_phases)
settings.register_profile("thorough", _base, max_examples=200)
settings.load_profile("default")
