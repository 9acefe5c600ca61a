"""Recorded runs -> samples. Formats are recognised by content; plugins add theirs by the same hook.

Start with :func:`healthcheck.readers.find.read_run` and :func:`healthcheck.readers.find.find_runs`.
Behaviour is written down in ``docs/reference/recorded-runs.md``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from healthcheck.extend.hookspecs import hookimpl
from healthcheck.readers.jsonfiles import JsonDocumentReader, JsonLinesReader, TrainerStateReader
from healthcheck.readers.mlflow import MlflowReader
from healthcheck.readers.modelcard import ModelCardReader
from healthcheck.readers.record import RecordReader
from healthcheck.readers.table import TableReader
from healthcheck.readers.tensorboard import TensorBoardReader
from healthcheck.readers.textlog import BoxReader, TextLogReader

if TYPE_CHECKING:
    from healthcheck.core.protocols import Reader

READERS: tuple[Reader, ...] = (
    RecordReader(),
    TrainerStateReader(),
    TensorBoardReader(),
    MlflowReader(),
    JsonLinesReader(),
    JsonDocumentReader(),
    ModelCardReader(),
    TableReader(),
    BoxReader(),
    TextLogReader(),
)
"""All built-in readers; of two that are equally sure, the earlier one reads."""


@hookimpl
def healthcheck_register_readers(register: Callable[[Reader], None]) -> None:
    for reader in READERS:
        register(reader)
