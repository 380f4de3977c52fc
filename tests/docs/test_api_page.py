"""docs/api.md is what tools/api_page.py makes of the docstrings."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

import infinilm

TOOL = Path(__file__).resolve().parents[2] / "tools/api_page.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("api_page", TOOL)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date(tool: ModuleType) -> None:
    assert tool.PAGE.read_text(encoding="utf-8") == tool.page(), "python tools/api_page.py"


@pytest.mark.parametrize("name", infinilm.__all__)
def test_every_public_name_has_a_docstring(name: str) -> None:
    assert name == "__version__" or len((getattr(infinilm, name).__doc__ or "").split()) > 3


def test_what_is_said_elsewhere_is_not_repeated(tool: ModuleType) -> None:
    """Fields of SamplingParams as keywords, names that are given twice, and methods of a base that the page has."""
    page = tool.page()
    assert "temperature: float = Ellipsis" not in page and "**fields_of_SamplingParams" in page
    seen: dict[object, str] = {}
    first, again = tool.section("PagedCacheConfig", seen), tool.section("PagedKVCacheConfig", seen)
    assert "block_size" in first and again == "## PagedKVCacheConfig\n\nAnother name of `PagedCacheConfig`.\n"
    base, derived = tool.section("GenerationMixin", seen), tool.section("ReferenceModel", seen)
    assert "### GenerationMixin.generate" in base and "### ReferenceModel.generate" not in derived
    assert "Inherited from `GenerationMixin`" in derived
