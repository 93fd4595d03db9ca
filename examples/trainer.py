"""Make a BERT Bayesian and fine-tune it with the Trainer of transformers; a callback adds the KL.

Needs `pip install '.[transformers]'` but no download: the BERT is tiny, the reviews come from a grammar
(examples/reviews.py). A third of them are mixed, with random labels, which a plain network memorises, so that it is
overconfident on others: the task was chosen for that. Takes half a minute on one core. The settings of the method were
chosen on other reviews than those in the table.
"""

from __future__ import annotations

import copy
import tempfile

import torch
from reviews import (
    WORDS,
    batch,
    clear,
    conclusion,
    encoded,
    mixed,
    out_of_distribution,
    plain_prediction,
    reviews,
    table,
)
from torch import nn
from transformers import AutoModelForSequenceClassification, BertConfig, Trainer, TrainerCallback, TrainingArguments

import bayesify as by
from bayesify.integrations.transformers import KLCallback

TRAINING = reviews(clear, "restaurants", 120, seed=0) + reviews(mixed, "restaurants", 60, seed=1)
TEST = {
    "clear": reviews(clear, "restaurants", 300, seed=2),
    "mixed": reviews(mixed, "restaurants", 150, seed=3),
    "OOD": reviews(out_of_distribution, "restaurants", 200, seed=4),
}


def tiny_bert() -> nn.Module:
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    return AutoModelForSequenceClassification.from_config(BertConfig(vocab_size=len(WORDS), **sizes))


def train(
    model: nn.Module,
    data: list[tuple[str, int]],
    optimizer: torch.optim.Optimizer,
    *callbacks: TrainerCallback,
    epochs: int,
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder,
            num_train_epochs=epochs,
            per_device_train_batch_size=20,
            logging_steps=100,
            save_strategy="no",
            report_to=[],
            dataloader_pin_memory=False,
            disable_tqdm=True,
        )
        options = {"callbacks": [*callbacks], "optimizers": (optimizer, None)}
        Trainer(model, args, train_dataset=encoded(data), **options).train()


def main() -> None:
    torch.set_num_threads(1)  # small networks are not faster with more
    torch.manual_seed(0)
    plain = tiny_bert()
    print("Train a plain BERT on the reviews.")
    train(plain, TRAINING, torch.optim.AdamW(plain.parameters(), lr=1e-3), epochs=10)

    model = by.convert(copy.deepcopy(plain), by.Rank1(4, mean_std=0.3, prior_std=0.5, dropout_rate=0.2))
    by.check(model, batch(TRAINING[:8])[0])
    print(f"\nConvert a copy, which adds {by.summary(model).overhead:.1f}% parameters, and train it further.")
    optimizer = torch.optim.AdamW(by.parameter_groups(model, lr=1e-3, posterior_lr=1e-2))
    train(model, TRAINING, optimizer, KLCallback(), epochs=30)

    print("\nTrain the plain one for as long.")
    train(plain, TRAINING, torch.optim.AdamW(plain.parameters(), lr=1e-3), epochs=30)

    inputs = {kind: batch(texts)[0] for kind, texts in TEST.items()}
    rows = {
        "plain BERT": {kind: plain_prediction(plain, x) for kind, x in inputs.items()},
        "Rank-1 BERT": {kind: by.predict(model, x, samples=40) for kind, x in inputs.items()},
    }
    print(f"\n{table(rows, TEST)}\n\n{conclusion(rows, TEST)}")


if __name__ == "__main__":
    main()
