"""Keys and the tokens that stand for them."""

import asyncio
import time

import httpx
import jwt
import pytest
import tinker
from tinker.lib._jwt_auth import _lifetime, jwt_claims

from skyrl.tinker.identity.callers import Keys
from skyrl.tinker.identity.ids import tenant_of_key
from skyrl.tinker.identity.tokens import Signer
from tests.tinker.harness import LiveServer, wait_until_ready


def keys(server: LiveServer) -> Keys:
    return server.app.state.server.service.keys


def token(server: LiveServer, key: str) -> str:
    return server.ok("/auth/token", {}, headers={"X-API-Key": key})["jwt"]


def status(server: LiveServer, key: str) -> int:
    return server.post("/create_session", {}, headers={"X-API-Key": key}).status_code


def stale(server: LiveServer, **claims) -> str:
    """A token of the first key with other claims."""
    signed = jwt_claims(token(server, "tml-a")) | claims
    return jwt.encode(signed, keys(server).signer._key, "HS256")


def test_token_has_the_claims_that_the_sdk_reads(server):
    claims = jwt_claims(token(server, "tml-any"))
    assert (claims["sub"], claims["org_id"], claims["email"]) == ("skyrl:user:local", "local", "local@localhost")
    assert _lifetime(token(server, "tml-any")) == 3600


def test_token_stands_for_its_key(locked):
    session = locked.ok("/create_session", {}, headers={"X-API-Key": token(locked, "tml-a")})["session_id"]
    beat = {"session_id": session}
    assert locked.post("/session_heartbeat", beat, headers={"X-API-Key": "tml-a"}).status_code == 200
    assert locked.post("/session_heartbeat", beat, headers={"X-API-Key": token(locked, "tml-b")}).status_code == 404


def test_a_link_ends_with_the_token_that_asked_for_it(locked):
    key = {"X-API-Key": "tml-a"}
    locked.http.headers.update(key)
    model = locked.model()
    path = locked.run("/save_weights", {"model_id": model, "seq_id": 1, "path": "a"})["path"]
    ends = jwt_claims(token(locked, "tml-a"))["exp"] - 3000
    archive = f"/training_runs/{model}/checkpoints/weights/a/archive"
    assert path.endswith("/weights/a")

    def lifetime(sent: str) -> int:
        answer = locked.http.get(archive, headers={"X-API-Key": sent, "Accept": "application/json"}).json()
        return jwt_claims(answer["url"].split("/")[-2])["exp"]

    assert lifetime(stale(locked, exp=ends)) == ends
    assert lifetime("tml-a") > ends + 2900


def test_wrong_key_gets_no_token(locked):
    response = locked.post("/auth/token", {}, headers={"X-API-Key": "tml-c"})
    assert response.status_code == 401 and "WWW-Authenticate" not in response.headers


@pytest.mark.parametrize("what", ["expired", "changed", "of another server", "unsigned", "of a removed key", "a link"])
def test_token_that_is_no_longer_good_is_refused_so_that_the_client_makes_another(locked, what):
    good = token(locked, "tml-a")
    header, _, signature = good.split(".")
    bad = {
        "expired": stale(locked, exp=int(time.time()) - 1),
        "changed": f"{header}.{stale(locked, tenant='x').split('.')[1]}.{signature}",
        "of another server": Keys({"tml-a": tenant_of_key(b"tml-a")}, Signer("00" * 32)).token_for(
            keys(locked).caller("tml-a")
        ),
        "unsigned": jwt.encode(jwt_claims(good), None, "none"),
        "of a removed key": stale(locked, tenant="key-0123456789abcdef"),
        "a link": keys(locked).signer.sign("download", {"tenant": "x"}, int(time.time()) + 60),
    }[what]
    response = locked.post("/create_session", {}, headers={"X-API-Key": bad})
    assert response.status_code == 401
    assert 'error="invalid_token"' in response.headers["WWW-Authenticate"]


@pytest.mark.full
def test_token_survives_a_restart(tmp_path):
    with LiveServer(tmp_path, api_keys=["tml-a"]) as server:
        good = token(server, "tml-a")
    with LiveServer(tmp_path, api_keys=["tml-a"]) as server:
        assert status(server, good) == 200
    with LiveServer(tmp_path, api_keys=["tml-b"]) as server:
        assert status(server, good) == 401


def test_sdk_client_gets_another_token_when_the_server_refuses_its_own(tmp_path):
    """The server's secret is gone, as it is where somebody deletes the database."""
    with LiveServer(tmp_path, api_keys=["tml-a"]) as server:
        wait_until_ready(server)
        url = str(server.http.base_url).removesuffix("/api/v1/")
        client = tinker.RestClient(base_url=url, api_key="tml-a")
        assert client.list_sessions().result().sessions == []
        server.app.state.server.service.keys = Keys({"tml-a": tenant_of_key(b"tml-a")}, Signer("11" * 32))
        assert client.list_sessions().result().sessions == []
        assert client.whoami().result().user_urn.startswith("skyrl:user:key-")


def test_key_is_described(locked):
    described = locked.http.get("/auth/apikey/me", headers={"X-API-Key": "tml-a"}).json()
    assert described["name"].startswith("key-") and isinstance(described["key_id"], int)
    assert described["details"]["org_details"] == {"name": "local"}
    assert "tml-a" not in str(described)


def test_keys_are_not_deleted_by_clients(locked):
    response = locked.http.delete("/auth/apikey/me", headers={"X-API-Key": "tml-a"})
    assert response.status_code == 403 and "--api-keys-file" in response.json()["detail"]
    assert status(locked, "tml-a") == 200


def test_secret_is_the_same_for_racing_starts(tmp_path):
    """Two jobs in one transaction see one secret."""
    from skyrl.tinker.database.database import Database
    from skyrl.tinker.database.queries.lookup import server_secret

    async def both() -> list[str]:
        database = Database(f"sqlite:///{tmp_path / 'x.db'}")
        try:
            return list(await asyncio.gather(database.write(server_secret), database.write(server_secret)))
        finally:
            await asyncio.to_thread(database.close)

    first, second = asyncio.run(both())
    assert first == second and len(first) == 64


def get_model(server: LiveServer, key: str, path: str = "") -> httpx.Response:
    return httpx.get(f"{server.url}/v1/models{path}", headers={"Authorization": f"Bearer {key}"}, timeout=60)


def test_a_key_is_sent_as_a_bearer_token_too(locked):
    assert get_model(locked, "tml-a").status_code == 200
    refused = get_model(locked, "tml-wrong")
    assert refused.status_code == 401 and refused.json()["error"]["type"] == "authentication_error"


def test_a_checkpoint_of_another_key_is_no_model(as_a):
    model = as_a.model(as_a.session())
    saved = as_a.run("/save_weights_for_sampler", {"model_id": model, "seq_id": 1, "path": "mine"})["path"]
    assert get_model(as_a, "tml-a", f"/{saved}").json()["id"] == saved
    refused = get_model(as_a, "tml-b", f"/{saved}")
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
