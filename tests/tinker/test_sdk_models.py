"""Creating models and asking about them, through the stock SDK."""

import numpy as np
import pytest
import tinker

from live import API_KEY, new_trainer, sequence, service, step, supervised


def test_capabilities_name_the_served_model(live_server):
    rest = tinker.RestClient(base_url=live_server.url, api_key=API_KEY)
    (model,) = rest.get_server_capabilities().result().supported_models
    assert model.model_name == live_server.base_model


def test_get_info_tells_what_was_created(service_client, live_server):
    trainer = new_trainer(service_client, live_server, rank=3)
    info = trainer.get_info()
    assert (info.model_data.model_name, info.is_lora, info.lora_rank) == (live_server.base_model, True, 3)


def test_model_ids_count_up_within_a_session(service_client, live_server):
    ids = [new_trainer(service_client, live_server).model_id for _ in range(2)]
    session = ids[0].split(":")[0]
    assert ids == [f"{session}:train:0", f"{session}:train:1"]


def test_tokenizer_round_trips_text(trainer):
    tokenizer = trainer.get_tokenizer()
    assert tokenizer.decode(tokenizer.encode("naïve café, 東京 🙂")) == "naïve café, 東京 🙂"


def test_unknown_base_model_is_refused_with_the_served_one(service_client, live_server):
    with pytest.raises(tinker.RequestFailedError, match=r"Qwen/Qwen3-8B(.|\n)*") as failure:
        service_client.create_lora_training_client("Qwen/Qwen3-8B").result()
    assert failure.value.category == "user"
    assert str(live_server.base_model) in str(failure.value)


def test_rank_above_the_limit_is_refused_with_the_limit(service_client, live_server):
    with pytest.raises(tinker.RequestFailedError, match="rank=4096"):
        new_trainer(service_client, live_server, rank=4096)


def test_dimuon_is_refused_for_a_model_without_an_adapter(service_client, live_server):
    with pytest.raises(tinker.RequestFailedError, match="'dimuon' is for adapters"):
        new_trainer(service_client, live_server, rank=0, optimizer=tinker.DimuonOptimizerConfig())


def test_same_seed_makes_the_same_adapter(service_client, live_server):
    tokens = sequence(9)
    trained = []
    for _ in range(2):
        trainer = new_trainer(service_client, live_server, seed=5)
        step(trainer, [supervised(tokens)])
        trained.append(step(trainer, [supervised(tokens)]).loss_fn_outputs[0]["logprobs"].to_numpy())
    np.testing.assert_array_equal(*trained)


def test_several_clients_train_at_once_and_get_what_they_get_alone(live_server):
    data = [[supervised(sequence(12, seed))] for seed in range(3)]

    def results(trainers):
        futures = [
            (trainer.forward_backward(one, "cross_entropy"), trainer.optim_step(tinker.AdamParams(learning_rate=1e-2)))
            for _ in range(3)
            for trainer, one in zip(trainers, data, strict=True)
        ]
        return [passed.result().metrics["loss:sum"] for passed, _ in futures][-3:]

    with service(live_server) as first, service(live_server) as second:
        together = results([new_trainer(owner, live_server, seed=i) for i, owner in enumerate([first, second, first])])
        alone = []
        for i in range(3):
            trainer = new_trainer(first, live_server, seed=i)
            for _ in range(2):
                step(trainer, data[i])
            alone.append(step(trainer, data[i]).metrics["loss:sum"])
    np.testing.assert_allclose(together, alone, rtol=1e-4)


def test_untrained_modules_stay_out_of_the_export(service_client, live_server):
    import oracle
    from live import adapter_folder

    trainer = new_trainer(service_client, live_server, train_mlp=False, train_unembed=False)
    step(trainer, [supervised(sequence(8))])
    path = trainer.save_weights_for_sampler("attention-only").result().path
    names = oracle.adapter(adapter_folder(live_server, path))
    assert names
    assert all(".self_attn." in name for name in names)
