import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from routewright.language_models.word_match import WordMatchForCausalLM, match_bias
from routewright.step_router.policy import pack, packed_log_probs


def tiny(**settings: object) -> WordMatchForCausalLM:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3_word_match", vocab_size=20, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, tie_word_embeddings=True, **settings,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


def test_the_bias_by_hand():
    tokens = torch.tensor([[7, 8, 7, 8]])
    allowed = torch.ones(1, 4, 4, dtype=torch.bool).tril()
    bias = match_bias(tokens, torch.arange(4)[None], allowed, heads=5, strength=2.0)[0]
    bias = bias.masked_fill(~allowed, 0.0)  # what a query does not see does not count
    same = [[2, 0, 0, 0], [0, 2, 0, 0], [2, 0, 2, 0], [0, 2, 0, 2]]
    follows = [[0, 0, 0, 0], [0, 0, 0, 0], [0, 2, 0, 0], [0, 0, 2, 0]]  # the key's left neighbour is the query's word
    precedes = [[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [2, 0, 0, 0]]  # the key's right one is, before the query
    assert bias[0].tolist() == same
    assert bias[1].tolist() == follows
    assert bias[2].tolist() == precedes
    assert bias[3].abs().sum() == 0
    assert bias[4].tolist() == same


def test_continuations_side_by_side_are_read_as_if_alone():
    prompts = [[3, 4, 5, 4], [6, 3]]
    actions = [[[4, 5, 1], [4, 4, 1], [3, 1]], [[3, 6, 1], [9, 3, 3, 1]]]
    model = tiny()
    packed = pack(prompts, actions, pad=0)
    together = packed_log_probs(model, packed)
    for row, (prompt, several) in enumerate(zip(prompts, actions, strict=True)):
        for number, action in enumerate(several):
            log_p = model(torch.tensor([[*prompt, *action]])).logits.log_softmax(-1)[0, len(prompt) - 1 : -1]
            alone = log_p[torch.arange(len(action)), torch.tensor(action)]
            torch.testing.assert_close(together[row][packed.owner[row] == number], alone)


def test_without_bias_it_is_qwen3():
    model = tiny(match_bias=0.0)
    config = AutoConfig.for_model("qwen3", **{k: v for k, v in model.config.to_dict().items() if k != "model_type"})
    plain = AutoModelForCausalLM.from_config(config).eval()
    plain.load_state_dict(model.state_dict())
    tokens = torch.tensor([[3, 4, 5, 3, 4]])
    torch.testing.assert_close(model(tokens).logits, plain(tokens).logits)
    assert not torch.allclose(tiny().eval()(tokens).logits, plain(tokens).logits)


def test_the_future_and_padding_change_nothing():
    model = tiny()
    tokens = torch.tensor([[3, 4, 5, 3, 6]])
    before = model(tokens).logits[:, :4]
    torch.testing.assert_close(model(torch.tensor([[3, 4, 5, 3, 9]])).logits[:, :4], before)
    torch.testing.assert_close(model(torch.tensor([[3, 4, 5, 3, 3]])).logits[:, :4], before)
    padded = model(torch.tensor([[3, 4, 5, 3, 6, 0, 0]]), attention_mask=torch.tensor([[1, 1, 1, 1, 1, 0, 0]]))
    torch.testing.assert_close(padded.logits[:, :4], before)


def test_a_four_dimensional_mask_means_the_same():
    model = tiny()
    tokens = torch.tensor([[3, 4, 5, 3, 4]])
    mask = torch.full((5, 5), torch.finfo(torch.float32).min).triu(1)[None, None]
    torch.testing.assert_close(model(tokens, attention_mask=mask).logits, model(tokens).logits)


def test_saved_and_loaded(tmp_path):
    model = tiny(match_bias=1.5)
    model.save_pretrained(tmp_path)
    tokens = torch.tensor([[3, 4, 5, 3]])
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.match_bias == 1.5
    torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits)
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=1)
    torch.testing.assert_close(
        classifier.model(tokens).last_hidden_state, model.model(tokens).last_hidden_state
    )


def test_a_cache_is_refused():
    model = tiny()
    with pytest.raises(ValueError, match="no cache"):
        model(torch.tensor([[3]]), cache=object())


def test_it_writes_without_a_cache():
    model = tiny(use_cache=False)
    tokens = torch.tensor([[3, 4, 5]])
    written = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=3, do_sample=False, use_cache=False
    )
    expected = tokens
    for _ in range(3):
        expected = torch.cat([expected, model(expected).logits[:, -1:].argmax(-1)], 1)
    assert written.tolist() == expected.tolist()
