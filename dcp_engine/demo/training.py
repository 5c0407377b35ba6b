"""The training loop of one rank, and the record that it leaves of every step."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional

from dcp_engine.demo.checkpointing import AsyncSaver, DyingSavePlanner, newest_step
from dcp_engine.demo.corpus import Corpus, draw_batch, read_standard_library
from dcp_engine.demo.model import VOCABULARY, Decoder, ModelConfig, lay_out, make_mesh
from dcp_engine.demo.records import Record, RecordWriter, StartRecord, StepRecord
from dcp_engine.demo.state import Training
from dcp_engine.storage.reader import ShardReader
from dcp_engine.storage.steps import step_name

__all__ = ["Job", "run", "train", "train_step"]

_GROUP_TIMEOUT_SECS = 60
_CORPUS_BYTES = 4 << 20
_MAX_GRAD_NORM = 1.0
_NUM_WARMUP_STEPS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one job does.

    Attributes:
        root: folder of the checkpoints.
        records: file for the records of rank 0.
        witness: file for the last words of the rank that dies.
        seed: of the initial weights and of the random draws of a fresh start.
        num_steps: length of the whole run, which the learning rate follows.
        last_step: step after which this job ends.
        save_every: steps between saves; 0 for none.
        die_at: step in whose save the last rank is killed; 0 for none.
        resume: start from the newest complete step.
        drop: part of the state that is left out of the checkpoints; empty for none.
        width: features of the model.
        layers: blocks of the model.
        window_bytes: tokens of one window.
        batch: windows in the global batch.
    """

    root: str
    records: str
    witness: str
    seed: int
    num_steps: int
    last_step: int
    save_every: int
    die_at: int
    resume: bool
    drop: str
    width: int
    layers: int
    window_bytes: int
    batch: int


def run(job: Job) -> None:
    """Trains one job on this rank, from process group to process group's end."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    # A peer that hangs must end the job soon, not after the default half hour.
    dist.init_process_group("gloo", timeout=timedelta(seconds=_GROUP_TIMEOUT_SECS))
    try:
        train(job)
    finally:
        dist.destroy_process_group()


def train(job: Job) -> None:
    """Trains one job on the ranks of the default process group, which all call it."""
    _Trainer(job).train()


class _Trainer:
    """Model, data, saver and records of one rank."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.rank = dist.get_rank()
        self.mesh = make_mesh(dist.get_world_size())
        self.corpus = read_standard_library(limit_bytes=_CORPUS_BYTES, min_document_bytes=job.window_bytes + 1)
        # Equal on every rank, and unequal in a job that resumes: what is right there can only have come from the checkpoint.
        torch.manual_seed(job.seed)
        model = Decoder(ModelConfig(width=job.width, num_layers=job.layers, window_bytes=job.window_bytes))
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        lay_out(model, self.mesh)
        self.training = Training(model, num_steps=job.num_steps, num_warmup_steps=_NUM_WARMUP_STEPS, drop=job.drop)
        torch.manual_seed(job.seed + 1)
        self.saver = AsyncSaver(job.root)
        self.records = RecordWriter(job.records) if self.rank == 0 else None

    def train(self) -> None:
        job = self.job
        started_secs = time.perf_counter()
        resumed_from = None
        if job.resume:
            resumed_from = newest_step(job.root)
            self.training.load(ShardReader(os.path.join(job.root, step_name(resumed_from))))
        self._write(
            StartRecord(
                world_size=dist.get_world_size(),
                layout="FSDP2+TP 2x2" if self.mesh.ndim == 2 else "FSDP2",
                resumed_from=resumed_from,
                num_parameters=self.num_parameters,
                corpus_bytes=self.corpus.size_bytes,
                load_secs=time.perf_counter() - started_secs if job.resume else 0.0,
            )
        )
        while self.training.step < job.last_step:
            self._write(train_step(self.training, self.corpus, self.mesh, num_windows=job.batch))
            if job.save_every and (self.training.step % job.save_every == 0 or self.training.step == job.last_step):
                self._save()
        self._write(self.saver.close())

    def _save(self) -> None:
        step = self.training.step
        dies = step == self.job.die_at and self.rank == dist.get_world_size() - 1
        planner = DyingSavePlanner(self.job.witness) if dies else None
        self._write(self.saver.save({"state": self.training.state}, step=step, planner=planner))

    def _write(self, entry: Record | None) -> None:
        if self.records is not None and entry is not None:
            self.records.write(entry)


def train_step(training: Training, corpus: Corpus, mesh: DeviceMesh, *, num_windows: int) -> StepRecord:
    """One step of training. All ranks call it; all of them return the same record.

    Args:
        training: moved on by one step.
        corpus: where the batch comes from.
        mesh: of the model; its ``dp`` dimension divides the batch.
        num_windows: windows in the global batch, a multiple of the data-parallel size.
    """
    batch = draw_batch(corpus, training.cursor.documents, num_windows=num_windows, window_bytes=training.model.config.window_bytes)
    part = batch.tokens.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()]
    logits = training.model(part[:, :-1])
    loss = functional.cross_entropy(logits.reshape(-1, VOCABULARY), part[:, 1:].reshape(-1))
    training.optimizer.zero_grad()
    # FSDP averages gradients over dp, and the parts are equally large: this is the gradient of the mean over the global batch.
    torch.autograd.backward(loss)
    grad_norm = torch.nn.utils.clip_grad_norm_(training.model.parameters(), _MAX_GRAD_NORM)
    assert isinstance(grad_norm, DTensor)
    mean_loss = loss.detach().clone()
    dist.all_reduce(mean_loss, group=mesh.get_group("dp"))
    # Measured before the optimizer moves the weights.
    entry = StepRecord(
        step=training.step + 1,
        loss=mean_loss.item() / mesh["dp"].size(),
        grad_norm=grad_norm.full_tensor().item(),
        lr=(float(training.optimizer.param_groups[0]["lr"]),),
        batch=batch.documents,
        draws=batch.draws_digest,
        values={"text": batch.tokens_digest},
    )
    training.optimizer.step()
    training.scheduler.step()
    training.cursor.documents += num_windows
    training.state.counters.update(loss=entry.loss)
    return entry
