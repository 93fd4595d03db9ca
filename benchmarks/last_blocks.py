"""Bayesian only in the last blocks: what it costs and what it gives: `python -m benchmarks.last_blocks`.

Cost: a ResNet-18 (batches of 32 images of 112 x 112) and a vision transformer of 6 blocks are converted by `Rank1(4)`
in the head, the last blocks or all layers. Measured is `by.predict` with 50 draws in plain forward passes: processor
time on one thread, the median of three interleaved rounds; for all layers, ten times that of 5 draws. The goal for a
last part is 1 + 50 x (its share of a plain forward pass) x 1.15.

Quality: the published CIFAR-10 ResNet-20 is fine-tuned for one pass over 2,560 training images (Adam, random crops and
flips) with a head, the last block, the last two or all layers Bayesian, three seeds each, and predicts 1,000 test
images with 12 draws; the AUROC is that of telling 500 test images of CIFAR-100 apart by their entropy. The size of the
noise is that of two with the lower NLL on 500 other test images with the first seed: the standard deviations of all
factors (Rank1) add up to 0.3 or 0.6 over the layers, exp(-5) or exp(-4) for each weight (MeanField). Differences to
all layers are paired by seed. Needs $BAYESIFY_DATA for this part.

Results are written as they come, and not measured again: benchmarks/results/last_blocks.json and last_blocks.md.
Options: cost, quality (default: both).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bayesify as by
from bayesify.lab.data import load
from bayesify.lab.metrics import accuracy, auroc, ece, nll
from bayesify.lab.models import build, load_weights
from benchmarks.draws import CIFAR, data_folder
from benchmarks.speed.tables import markdown

RESULTS = Path(__file__).parent / "results" / "last_blocks.json"
DRAWS, SLACK, ROUNDS = 50, 1.15, 3
SEEDS, STEPS, BATCH = (0, 1, 2), 40, 64
SIZES = {"Rank1": (0.3, 0.6), "MeanField": (-5.0, -4.0)}
WHERE: dict[str, int | None] = {"head": 0, "last block": 1, "last two blocks": 2, "all layers": None}


# Networks.


class BasicBlock(nn.Module):
    """The residual block of ResNet-18, as torchvision has it: batch norms, ReLUs in place."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.bn1, self.relu = nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = None
        if stride > 1 or before != width:
            self.downsample = nn.Sequential(nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class ResNet18(nn.Module):
    """ResNet-18 (He et al. 2016) with torchvision's names."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1, self.relu, self.maxpool = nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(BasicBlock(64, 64, 1), BasicBlock(64, 64, 1))
        self.layer2 = nn.Sequential(BasicBlock(64, 128, 2), BasicBlock(128, 128, 1))
        self.layer3 = nn.Sequential(BasicBlock(128, 256, 2), BasicBlock(256, 256, 1))
        self.layer4 = nn.Sequential(BasicBlock(256, 512, 2), BasicBlock(512, 512, 1))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(512, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(self.avgpool(x).flatten(1))


class Block(nn.Module):
    """A transformer block: attention and an MLP, each after a norm and beside a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.qkv, self.proj = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2, self.fc1, self.fc2 = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class VisionTransformer(nn.Module):
    """Patches, a class token, positions, blocks, a norm and a head, with timm's names."""

    def __init__(self, width: int = 192, depth: int = 6, patches: int = 49, classes: int = 1000) -> None:
        super().__init__()
        self.cls_token, self.pos_embed = (nn.Parameter(0.02 * torch.randn(1, n, width)) for n in (1, patches + 1))
        self.patch_embed = nn.Conv2d(3, width, 16, 16)
        self.blocks = nn.ModuleList(Block(width, 3) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


def converted(network: nn.Module, method: Any, blocks: int | None) -> nn.Module:
    """The network with its last blocks, or all layers, Bayesian."""
    return by.convert(network, method if blocks is None else by.last(network, method, blocks))


# Cost.


def seconds(call: Callable[[], object]) -> float:
    """How much time of the processor a call takes."""
    start = time.process_time()
    call()
    return time.process_time() - start


def share(network: nn.Module, model: nn.Module, x: Tensor) -> Callable[[], tuple[float, float]]:
    """Measures the seconds of a plain forward pass, and from the first layer on that is Bayesian in the model."""
    first = next(name for name, layer in model.named_modules() if hasattr(layer, "posterior"))
    begun: list[float] = []
    network.get_submodule(first).register_forward_pre_hook(lambda *_: begun.append(time.process_time()))

    def measure() -> tuple[float, float]:
        start = time.process_time()
        with torch.no_grad():
            network(x)
        end = time.process_time()
        return end - start, end - begun[-1]

    return measure


def costs() -> dict[str, Any]:
    """For each network and part of it: 50 draws in plain forward passes, and the part's share of one."""
    x, found = torch.randn(32, 3, 112, 112), {}
    networks = {
        "ResNet-18": (ResNet18, {"last stage": 2, "last block": 1}),
        "ViT": (VisionTransformer, {"last block": 1}),
    }
    for name, (make, parts) in networks.items():
        models, plain = {}, {}
        for where, blocks in {"head": 0, **parts, "all layers": None}.items():
            models[where] = converted(make(), by.Rank1(4), blocks).eval()
            plain[where] = share(make().eval(), models[where], x)
        times: dict[str, list[tuple[float, float, float]]] = {where: [] for where in models}
        for _ in range(ROUNDS):
            for where, model in models.items():
                samples = 5 if where == "all layers" else DRAWS
                forward, part = plain[where]()
                times[where].append((forward, part, seconds(lambda m=model, s=samples: by.predict(m, x, s))))
        for where, each in times.items():
            scale = DRAWS / 5 if where == "all layers" else 1
            ratio = statistics.median(scale * draws / forward for forward, _, draws in each)
            part = 1.0 if where == "all layers" else statistics.median(part / forward for forward, part, _ in each)
            found[f"{name}/{where}"] = {"share": part, "forwards": ratio, "goal": 1 + DRAWS * part * SLACK}
            print(name, where, found[f"{name}/{where}"], flush=True)
    return found


# Quality.


def method_of(name: str, size: float, layers: int) -> Any:
    """A method whose noise has this size."""
    if name == "MeanField":
        return by.MeanField(estimator="flipout", init_log_std=(size, size))
    std = size / math.sqrt(layers)
    return by.Rank1(4, mean_std=1.2 * std, prior_std=std, dropout_rate=std**2 / (1 + std**2))


class Quality:
    """Fine-tunes the published ResNet-20 and measures its predictions."""

    def __init__(self) -> None:
        self.data = load("cifar10", **CIFAR)
        test, other = self.data.test, load("cifar100", **CIFAR).test
        self.chosen_on = self._batch(test, torch.arange(0, 500)), test.targets[:500]
        self.test = self._batch(test, torch.arange(5000, 6000)), test.targets[5000:6000]
        self.other = self._batch(other, torch.arange(0, len(other), len(other) // 500)[:500])

    def _batch(self, examples: Any, rows: Tensor) -> Tensor:
        return self.data.inputs.prepare(examples.raw(rows))

    def network(self) -> nn.Module:
        """The published network."""
        network = build("resnet20", shape=(3, 32, 32), outputs=10)
        load_weights(network, data_folder() / "weights" / "resnet20-12fca82f.th")
        return network

    def tuned(self, name: str | None, size: float, blocks: int | None, seed: int) -> nn.Module:
        """The network, converted unless the name is None, after one pass over some images."""
        torch.manual_seed(seed)
        model = self.network()
        if name is not None:
            layers = len(by.last(model, by.Rank1(4), 9 if blocks is None else blocks))
            model = converted(model, method_of(name, size, layers), blocks)
        groups = [
            {"params": [p for n, p in model.named_parameters() if (".posterior." in n) == posterior], "lr": lr}
            for posterior, lr in ((False, 1e-4), (True, 5e-3))
        ]
        optimizer = torch.optim.Adam([group for group in groups if group["params"]])
        rows = torch.randperm(len(self.data.train))[: STEPS * BATCH]
        model.train()
        for some in rows.split(BATCH):
            x, y = self._batch(self.data.train, some), self.data.train.targets[some]
            top, left = torch.randint(9, (2,)).tolist()
            x = F.pad(x, (4, 4, 4, 4))[:, :, top : top + 32, left : left + 32]
            x = torch.where(torch.rand(len(x), 1, 1, 1) < 0.5, x.flip(3), x)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y) if name is None else by.elbo(model, x, y, n=len(self.data.train)).loss
            loss.backward()
            optimizer.step()
        return model.eval()

    def predicted(self, model: nn.Module, x: Tensor, is_bayesian: bool) -> tuple[Tensor, Tensor]:
        """The log-probabilities and their entropy."""
        if is_bayesian:
            p = by.predict(model, x, 12, batch_size=250)
            return p.log_probs, p.entropy
        with torch.no_grad():
            log_probs = torch.cat([model(some) for some in x.split(250)]).log_softmax(-1)
        return log_probs, -(log_probs.exp() * log_probs).sum(-1)

    def measured(self, model: nn.Module, is_bayesian: bool = True) -> dict[str, float]:
        """The metrics on test images."""
        log_probs, entropy = self.predicted(model, self.test[0], is_bayesian)
        probs, y = log_probs.exp(), self.test[1]
        others = self.predicted(model, self.other, is_bayesian)[1]
        values = {"accuracy": accuracy(probs, y), "nll": nll(log_probs, y), "ece": ece(probs, y)}
        return {key: float(value) for key, value in (values | {"auroc": auroc(entropy, others)}).items()}

    def chosen(self, name: str, blocks: int | None) -> tuple[float, nn.Module]:
        """The size of the noise with the lower NLL on validation images, and the network of the first seed."""
        found = []
        for size in SIZES[name]:
            model = self.tuned(name, size, blocks, SEEDS[0])
            x, y = self.chosen_on
            found.append((float(nll(self.predicted(model, x, True)[0], y)), size, model))
        _, size, model = min(found, key=lambda each: each[0])
        return size, model


def qualities(read: Callable[[], dict[str, Any]], write: Callable[[str, Any], None]) -> None:
    """Measure the rows that are missing."""
    quality = Quality()
    for seed in SEEDS:
        if f"none/plain/{seed}" not in read():
            write(f"none/plain/{seed}", quality.measured(quality.tuned(None, 0, None, seed), is_bayesian=False))
    for name in SIZES:
        for where, blocks in WHERE.items():
            keys = {seed: f"{name}/{where}/{seed}" for seed in SEEDS}
            if all(key in read() for key in keys.values()):
                continue
            size, model = quality.chosen(name, blocks)
            for seed, key in keys.items():
                model = model if seed == SEEDS[0] else quality.tuned(name, size, blocks, seed)
                write(key, {"size": size, **quality.measured(model)})


# The page.


def quality_rows(results: dict[str, Any]) -> list[list[str]]:
    """A line for each method and part: means over seeds, and differences to all layers."""
    lines = []
    for name, where in [("none", "plain"), *((name, where) for name in SIZES for where in WHERE)]:
        mine = [results.get(f"{name}/{where}/{seed}") for seed in SEEDS]
        whole = [results.get(f"{name}/all layers/{seed}") for seed in SEEDS]
        if not all(mine):
            continue
        cells = []
        for measure, digits in (("accuracy", 4), ("nll", 4), ("ece", 4), ("auroc", 4)):
            values = [each[measure] for each in mine]
            cell = f"{statistics.fmean(values):.{digits}f}"
            if where != "all layers" and all(whole):
                differences = [a - b[measure] for a, b in zip(values, whole, strict=True)]
                error = statistics.stdev(differences) / math.sqrt(len(differences))
                cell += f" ({statistics.fmean(differences):+.{digits}f} ± {error:.{digits}f})"
            cells.append(cell)
        lines.append([name, where, *cells])
    return lines


def page(results: dict[str, Any]) -> str:
    """The tables in Markdown."""
    cost = [
        [*key.split("/"), f"{each['share']:.3f}", f"{each['forwards']:.1f}"]
        + ([""] if key.endswith("all layers") else [f"≤ {each['goal']:.1f}"])
        for key, each in results.get("cost", {}).items()
    ]
    words = [" ".join(part.split()) for part in (__doc__ or "").split("\n\n")]
    return "\n".join(
        [
            "# Bayesian last blocks\n",
            f"Written by `python -m benchmarks.last_blocks`. {words[1]}\n",
            markdown(
                ["network", "Bayesian", "share of a forward pass", f"{DRAWS} draws, in forward passes", "goal"], cost
            ),
            f"{words[2]} In brackets: the difference to all layers, and its standard error.\n",
            markdown(
                ["method", "Bayesian", "accuracy", "NLL", "ECE", "AUROC"], quality_rows(results.get("quality", {}))
            ),
        ]
    )


def main() -> None:
    """Measure what is missing, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=["cost", "quality", []])
    given = parser.parse_args().parts or ["cost", "quality"]
    torch.set_num_threads(1)
    os.environ.setdefault("BAYESIFY_DATA", str(data_folder()))

    def read() -> dict[str, Any]:
        return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}

    def write(part: str, values: Any) -> None:
        results = read()
        results[part] = results.get(part, {}) | values
        results["versions"] = {"torch": torch.__version__, "python": platform.python_version()}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        RESULTS.with_suffix(".md").write_text(page(results), encoding="utf-8")

    if "cost" in given:
        write("cost", costs())
    if "quality" in given:
        qualities(lambda: read().get("quality", {}), lambda key, values: write("quality", {key: values}))


if __name__ == "__main__":
    main()
