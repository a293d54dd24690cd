"""Behind a proxy that takes a path off: clients get there, and the links that they are given lead there too."""

import json
from collections.abc import Iterator
from urllib.request import Request, urlopen

import pytest
import tinker

from live import ADAM, datum, sample
from skyrl.tinker.local_server import close_client
from tests.tinker.harness import BASE_MODEL, LiveServer, wait_until_ready
from tests.tinker.prefix_proxy import serving
from tests.tinker.test_config import parsed, refusal
from tests.tinker.test_rest_checkpoints import published
from tests.tinker.test_rest_downloads import archive_url, exported, links, members
from tests.tinker.test_rest_uploads import begun


@pytest.fixture(scope="module")
def public(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server behind a proxy, of whose clients none sees its own address."""
    with serving("/tinker") as proxy:
        url = f"http://127.0.0.1:{proxy.server_port}/tinker/"
        with LiveServer(tmp_path_factory.mktemp("public"), public_url=url) as server:
            proxy.upstream = server.http.base_url.port
            wait_until_ready(server)
            yield server


def begins_with(server: LiveServer, url: str) -> bool:
    return url.startswith(f"{server.config.public_url}/api/v1/")


def test_the_stock_sdk_trains_and_samples_through_the_prefix(public):
    service = tinker.ServiceClient(base_url=public.config.public_url, api_key="tml-test")
    trainer = service.create_lora_training_client(BASE_MODEL, rank=4).result()
    passed = trainer.forward_backward([datum([1, 2, 3])], "cross_entropy")
    trainer.optim_step(ADAM).result()
    sampler = trainer.save_weights_and_get_sampling_client().result()
    assert len(passed.result().loss_fn_outputs) == 1 and sample(sampler, [1, 2]).sequences[0].tokens
    close_client(service)


def test_the_stock_sdk_downloads_exported_files_from_their_links(public):
    path = exported(public)
    rest = tinker.RestClient(base_url=public.config.public_url, api_key="tml-test")
    answer = rest.get_external_weights_urls(path).result()
    assert all(begins_with(public, url) for url in answer.urls.values())
    with urlopen(answer.urls["state.json"]) as response:
        assert "weights" in json.load(response)


def test_an_archive_is_downloaded_from_its_link(public):
    url = archive_url(public, published(public))
    assert begins_with(public, url)
    with urlopen(url) as response:
        assert "state.json" in members(response.read())


def test_a_file_is_uploaded_to_its_link(public):
    urls = begun(public)["urls"]
    assert urls and all(begins_with(public, url) for url in urls.values())
    with urlopen(Request(urls["adapter_config.json"], b"{}", method="PUT")) as response:
        assert response.status == 200


def test_a_trace_is_downloaded_from_its_link(public):
    session = public.session()
    rest = tinker.RestClient(base_url=public.config.public_url, api_key="tml-test")
    url = rest.export_session_trace(session).result()
    assert begins_with(public, url)
    with urlopen(url) as response:
        assert json.load(response)["otherData"] == {"session_id": session}


def test_without_a_public_url_links_name_the_host_that_the_client_asked(server):
    (url,) = links(server, exported(server)).values()
    assert url.startswith(str(server.http.base_url))


@pytest.mark.parametrize("value", ["host/tinker", "ftp://host", "https://", "https://host/?a=b", "https://host/#x"])
def test_what_no_path_can_be_added_to_is_refused(capsys, value):
    assert f"--public-url={value}: it is no URL" in refusal(capsys, "--public-url", value)


def test_a_slash_at_the_end_of_the_public_url_is_left_out():
    assert parsed("--public-url", "https://host/tinker/").public_url == "https://host/tinker"
