"""Hugging Face's GPT-2, BERT and Llama in tiny configurations with random weights: nothing is downloaded."""

import torch
import torch.nn.functional as F
from torch import nn

from foreign.spec import generator, per_row, seeded, variant

WIDTH, HEADS, LAYERS, TOKENS, VOCABULARY = 64, 4, 2, 16, 96


def _gpt2(head, **more):
    import transformers

    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=TOKENS, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        bos_token_id=1, eos_token_id=1, pad_token_id=0, **more,
    )  # fmt: skip
    return getattr(transformers, head)(config)


def gpt2_lm():
    return _gpt2("GPT2LMHeadModel")


def gpt2_classifier():
    return _gpt2("GPT2ForSequenceClassification", num_labels=1)


def bert():
    import transformers

    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        intermediate_size=128, max_position_embeddings=TOKENS, num_labels=1,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def llama():
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=128, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=2, max_position_embeddings=TOKENS, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


class Actor(nn.Module):
    """States and actions [B, T] -> log-probabilities of rows' actions [B], which are no logits of clicks."""

    def __init__(self):
        super().__init__()
        self.model = llama()

    def forward(self, states, actions):
        found = self.model(input_ids=states).logits.log_softmax(-1)
        return found.gather(2, actions.unsqueeze(2)).squeeze(2).sum(1)


def acted(rows):
    states = tokens(rows)["input_ids"]
    return states, states.flip(0)


def _policy_gradient(output):
    """REINFORCE, with advantages of both signs."""
    return -(torch.linspace(-1, 1, len(output)) * output).mean()


def checkpointing(build, reentrant):
    def built():
        model = build()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        return model

    return built


def tokens(rows):
    drawn = torch.randint(2, VOCABULARY, (rows, TOKENS), generator=generator())
    return {"input_ids": drawn, "attention_mask": torch.ones_like(drawn)}


def padded(rows):
    """Row i has 16 - i % 4 tokens."""
    made = tokens(rows)
    mask = (torch.arange(TOKENS) < TOKENS - torch.arange(rows).unsqueeze(1) % 4).long()
    return {"input_ids": made["input_ids"] * mask, "attention_mask": mask}


def _logits(output):
    return output.logits


def _next_token(output):
    targets = torch.arange(output.logits.shape[:-1].numel(), device=output.logits.device) % VOCABULARY
    return F.cross_entropy(output.logits.flatten(0, 1), targets)


def _score(output):
    scores = output.logits.squeeze(-1)
    return F.binary_cross_entropy_with_logits(scores, (torch.arange(len(scores)) % 2).to(scores))


_GPT2 = LAYERS * 12 * WIDTH**2  # c_attn 3, c_proj 1, c_fc 4, c_proj 4 squares of the width, for each token
_BERT = LAYERS * (4 * WIDTH**2 + 2 * WIDTH * 128)
_LLAMA = LAYERS * (WIDTH * (WIDTH + 2 * 32) + WIDTH**2 + 3 * WIDTH * 128)
_HEAD = WIDTH * VOCABULARY

_LIBRARY = {"logits": _logits, "needs": ("transformers",)}

GPT2 = per_row(
    "hf_gpt2_lm",
    gpt2_lm,
    tokens,
    TOKENS * (_GPT2 + _HEAD),
    loss=_next_token,
    **_LIBRARY,
    notes="Conv1D is addmm on [in, out] weights; `lm_head.weight` is `transformer.wte.weight`. Dropout is 0.",
)
LLAMA = per_row(
    "hf_llama",
    llama,
    tokens,
    TOKENS * (_LLAMA + _HEAD),
    loss=_next_token,
    **_LIBRARY,
    notes="RMSNorm, rotary embeddings, grouped queries, SwiGLU.",
)
MODELS = [
    GPT2,
    per_row(
        "hf_gpt2_classifier",
        gpt2_classifier,
        padded,
        TOKENS * (_GPT2 + WIDTH),
        loss=_score,
        **_LIBRARY,
        notes="Logits [B, 1] are those of the last token that is not padding.",
    ),
    per_row(
        "hf_bert",
        bert,
        padded,
        TOKENS * _BERT + WIDTH**2 + WIDTH,
        loss=_score,
        **_LIBRARY,
        notes="Sequence classification; dropout is 0.",
    ),
    LLAMA,
    variant(LLAMA, name="actor", build=seeded(Actor), inputs=acted, loss=_policy_gradient, logits=None),
    *(
        variant(
            model,
            name=f"{model.name}_checkpointed{'_reentrant' if reentrant else ''}",
            build=seeded(checkpointing(build, reentrant)),
            export_strict=False,  # KeyError in torch.export on any activation checkpoint
            pickles=False,  # the library hooks a local function to the embedding
            notes="gradient_checkpointing_enable(): a hook makes the embedding's output need a gradient.",
        )
        for model, build, reentrant in ((GPT2, gpt2_lm, False), (GPT2, gpt2_lm, True), (LLAMA, llama, False))
    ),
]
