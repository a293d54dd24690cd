"""Published versions are handles: nothing of them is known but what their backend says."""

from concurrent.futures import Future

from skyrl.backends.common.versions import BASE_SLOT, VersionPool


def pool(max_bytes: int = 100) -> VersionPool[str]:
    """Adapters are words, of a byte per letter, and of four letters where they are sampled."""

    def load(path: str) -> Future[str]:
        reading: Future[str] = Future()
        reading.set_result(path.strip("/"))
        return reading

    def fitted(word: str) -> str:
        return word if len(word) >= 4 else word.ljust(4)

    return VersionPool(slots=2, nbytes=len, fitted=fitted, load=load, max_bytes=max_bytes)


def sampled(versions: VersionPool[str], version: str | None) -> str | None:
    """Return the content of the slot that a sample of this version is given."""
    claim = versions.claim(version)
    slot = versions.acquire(claim)
    assert slot is not None
    adapter = versions.adapter(slot)
    versions.release(slot)
    versions.disclaim(claim)
    return adapter


def test_the_base_model_has_no_handle():
    assert sampled(pool(), None) is None and pool().content(BASE_SLOT) == 0


def test_a_version_is_sampled_as_its_backend_fits_it_and_a_copy_counts_beside_it():
    versions = pool()
    versions.publish("short", "ab")
    assert sampled(versions, "short") == "ab  " and versions.held_bytes == 2 + 4
    versions.publish("long", "abcdef")
    assert sampled(versions, "long") == "abcdef" and versions.held_bytes == 2 + 6


def test_a_stored_version_is_evicted_for_its_bytes_and_read_again():
    versions, word = pool(max_bytes=8), "first"
    versions.publish("first", word)
    versions.mark_stored("first", word, "/first")
    versions.publish("other", "other")
    assert versions.held_bytes == 5
    assert sampled(versions, "first") == "first"
