"""Shows a run in Weights & Biases, online or, with WANDB_MODE=offline, in RUN/wandb.

The id of the run in W&B is made from the first line of metrics.jsonl: no two runs share that line,
and a run that is continued, or moved, keeps it. W&B leaves out updates that it has already.
"""

import hashlib
import os
from pathlib import Path
from typing import Any

import wandb

from nmt.config import load_recorded_config, to_plain_values
from nmt.system.files import check_own_folder, open_plain_file
from nmt.system.run_folder import RunFolder
from nmt.train.metrics_log import LONGEST_LINE
from nmt.train.sinks import SAMPLE_TEXTS, name_figures

INIT_S = 30


class WandbSink:
    def __init__(self, path: Path) -> None:
        run = RunFolder(path)
        check_own_folder(path / "wandb", inside=path)
        config = load_recorded_config(run.config)
        with open_plain_file(run.metrics) as file:
            first_line = file.readline(LONGEST_LINE)
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "nmt"),
            name=config.name,
            id=hashlib.sha256(first_line).hexdigest()[:16],
            resume="allow",
            dir=path,
            config=to_plain_values(config),
            # The timeout is for a network that is gone: W&B would keep the process from ending.
            settings=wandb.Settings(
                init_timeout=INIT_S,
                console="off",
                silent=True,
                disable_git=True,
                save_code=False,
                x_disable_stats=True,
            ),
        )
        self.rows: list[list[Any]] = []  # samples of the validation that is being read

    def write(self, line: dict[str, Any]) -> None:
        step = line["step"]
        if line["kind"] == "sample":
            texts = [str(line.get(key)) for key in SAMPLE_TEXTS]
            self.rows.append([line.get("line"), *texts])
            return
        values: dict[str, Any] = {**name_figures(line)}
        if line["kind"] == "valid" and self.rows:
            values["samples"] = wandb.Table(columns=["line", *SAMPLE_TEXTS], data=self.rows)
            self.rows = []
        self.run.log(values, step=step)

    def close(self) -> None:
        self.run.finish()
