"""Stages of a model in processes of their own, on this machine or on others; the first one has the scheduler."""

from infinilm.pipeline.agent import run_stage
from infinilm.pipeline.front import FrontStage, StagedEngine, check_settings, count_stages
from infinilm.pipeline.identity import one_or_each
from infinilm.pipeline.wire import KEY_VARIABLE

__all__ = ["KEY_VARIABLE", "FrontStage", "StagedEngine", "check_settings", "count_stages", "one_or_each", "run_stage"]
