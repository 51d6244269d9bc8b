import sys

import pytest
import torch
from safetensors.torch import save_file

from phasewise import record
from phasewise.encodings import NoPEConfig, PoPEConfig, RoPEConfig
from phasewise.model.folder import CONFIG, WEIGHTS, inside, lacking, load, save
from tests.model.small import model_of, tokens_of


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("tied", [False, True])
def test_a_saved_model_comes_back_the_same(tmp_path, encoding, tied):
    model, tokens = model_of(encoding, tied=tied), tokens_of(2, 9)
    save(model, tmp_path / "new" / "model")
    loaded = load(tmp_path / "new" / "model")
    assert names(tmp_path / "new" / "model") == [CONFIG, WEIGHTS]
    assert loaded.config == model.config
    assert not loaded.training
    assert torch.equal(loaded(tokens), model(tokens))


def test_weights_that_are_no_numbers_are_refused_by_name(tmp_path):
    model = model_of(NoPEConfig())
    with torch.no_grad():
        model.norm.weight[0] = torch.inf
    save(model, tmp_path)
    with pytest.raises(ValueError, match=r"norm\.weight in .* is not finite; .*fetch it again"):
        load(tmp_path)


def test_another_dtype_is_given_where_it_is_asked_for(tmp_path):
    save(model_of(NoPEConfig()), tmp_path)
    opened = load(tmp_path, dtype=torch.bfloat16)
    assert {weight.dtype for weight in opened.state_dict().values()} == {torch.bfloat16}
    assert not opened.training


@pytest.mark.parametrize("dtype", ["bfloat16", torch.int32], ids=str)
def test_a_dtype_that_no_model_computes_in_is_named(tmp_path, dtype):
    with pytest.raises(ValueError, match=rf"dtype is {dtype!r}; give one of torch.float32, .*None as saved"):
        load(tmp_path, dtype=dtype)


def test_the_dtype_comes_back_too(tmp_path):
    model = model_of(PoPEConfig(phase_init="uniform"), dtype=torch.bfloat16)
    save(model, tmp_path)
    for (name, own), (_, back) in zip(
        model.state_dict().items(), load(tmp_path).state_dict().items(), strict=True
    ):
        assert own.dtype == back.dtype, name
        assert torch.equal(own, back), name


def test_who_may_read_the_config_may_read_the_weights(tmp_path):
    save(model_of(NoPEConfig()), tmp_path)
    assert (tmp_path / WEIGHTS).stat().st_mode == (tmp_path / CONFIG).stat().st_mode


def test_saving_again_replaces_the_weights(tmp_path):
    save(model_of(NoPEConfig(), seed=0), tmp_path)
    later = model_of(NoPEConfig(), seed=1)
    save(later, tmp_path)
    assert torch.equal(load(tmp_path)(tokens_of(1, 5)), later(tokens_of(1, 5)))


def test_a_model_of_another_config_is_not_overwritten(tmp_path):
    first = model_of(NoPEConfig())
    save(first, tmp_path)
    with pytest.raises(ValueError, match=r"another config\.json; give another folder"):
        save(model_of(RoPEConfig()), tmp_path)
    assert torch.equal(load(tmp_path)(tokens_of(1, 5)), first(tokens_of(1, 5)))


@pytest.mark.parametrize("survivors", [0, 1])
def test_an_interrupted_save_leaves_a_whole_model_or_none(tmp_path, monkeypatch, survivors):
    replace, done = record.os.replace, []

    def interrupted(source, target):
        if len(done) == survivors:
            raise KeyboardInterrupt
        done.append(target)
        replace(source, target)

    monkeypatch.setattr(record.os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(model_of(NoPEConfig()), tmp_path)
    assert names(tmp_path) == [WEIGHTS][:survivors]
    with pytest.raises(ValueError, match=r"has no config\.json"):
        load(tmp_path)
    monkeypatch.undo()
    save(model_of(RoPEConfig()), tmp_path)
    assert load(tmp_path).config.encoding == RoPEConfig()


def test_a_folder_without_a_whole_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"has no config\.json; give a folder that `save` has written"):
        load(tmp_path / "nowhere")
    save(model_of(NoPEConfig()), tmp_path)
    (tmp_path / WEIGHTS).unlink()
    with pytest.raises(ValueError, match=r"has no model\.safetensors"):
        load(tmp_path)


def test_of_a_run_of_several_trainings_their_folders_are_named(tmp_path):
    assert lacking(tmp_path) == f"{tmp_path} has no config.json; give the folder of a checkpoint"
    for name in ("rope-seed0", "pope-seed0"):
        save(model_of(NoPEConfig()), tmp_path / "runs" / name / "model")
    runs = tmp_path / "runs"
    assert lacking(tmp_path).endswith(f"a checkpoint, as {runs / 'pope-seed0'} or {runs / 'rope-seed0'}")


@pytest.mark.parametrize("training", [".", "stages/64", "runs/rope-seed0"])
def test_a_run_whose_training_has_not_ended_is_told_so(tmp_path, training):
    (tmp_path / training).mkdir(parents=True, exist_ok=True)
    (tmp_path / training / "metrics.jsonl").touch()
    assert "has no model yet, as its training has not ended: go on with it by --resume" in lacking(tmp_path)


def test_a_damaged_config_and_weights_that_do_not_fit_are_refused(tmp_path):
    model = model_of(NoPEConfig())
    save(model, tmp_path)
    weights = model.state_dict()
    weights["extra"] = weights.pop("norm.weight")
    weights["embedding.weight"] = weights["embedding.weight"][:3].clone()
    save_file(weights, tmp_path / WEIGHTS)
    with pytest.raises(ValueError, match=r"does not fit config\.json beside it: ") as refused:
        load(tmp_path)
    said = (
        f"1 of {len(weights)} tensors missing (norm.weight), 1 unknown (extra), "
        f"1 of another shape (embedding.weight [3, 24], not [13, 24]); copy both again"
    )
    assert said in str(refused.value)
    (tmp_path / WEIGHTS).write_bytes(b"not safetensors")
    with pytest.raises(ValueError, match="is not a whole safetensors file"):
        load(tmp_path)
    (tmp_path / CONFIG).write_text("{}")
    with pytest.raises(ValueError, match=r"config\.json is not a model's config"):
        load(tmp_path)


def test_without_safetensors_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ValueError, match=r"pip install 'phasewise\[train\]'"):
        save(model_of(NoPEConfig()), tmp_path)
    assert names(tmp_path) == []


@pytest.mark.parametrize("dtype", [torch.int32, torch.float8_e4m3fn])
def test_weights_in_a_dtype_that_nothing_is_computed_in_are_refused(tmp_path, dtype):
    model = model_of(NoPEConfig())
    save(model, tmp_path)
    save_file({name: weight.to(dtype) for name, weight in model.state_dict().items()}, tmp_path / WEIGHTS)
    with pytest.raises(
        ValueError, match=rf"in {str(dtype)[6:]}, in which nothing can be computed; store it in"
    ):
        load(tmp_path)


def test_a_training_stands_for_the_model_in_it(tmp_path):
    save(model_of(NoPEConfig()), tmp_path / "mine" / "model")
    assert inside(tmp_path / "mine") == inside(tmp_path / "mine" / "model") == tmp_path / "mine" / "model"
    save(model_of(NoPEConfig()), tmp_path / "mine")
    assert inside(tmp_path / "mine") == tmp_path / "mine"
