"""A local search engine for the environments `search` and `searchcode`: BM25 over a file of documents.

Run: `python -m skyrl.envs.services.retrieval --corpus FILE.jsonl --port 8000`. Each line is `{"id": ..., "contents":
"..."}`. Needs the extra `search` (`pip install 'skyrl[search]'`).

`POST /retrieve` takes `{"query": text}` or `{"queries": [texts]}`, with `topk` (3) and `return_scores` (true). It
answers `{"result": [[{"document": {"id", "contents"}, "score"}, ...], ...]}`, one list per query, the best document
first. Without `return_scores`, the lists contain the documents themselves. Documents that share no word with the query
are not found.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import bm25s
import numpy as np
import uvicorn
from fastapi import FastAPI, HTTPException
from pydantic import BaseModel, ConfigDict, PositiveInt

from skyrl.errors import ConfigError
from skyrl.utils.console import say_error


class Document(BaseModel):
    """A line of the corpus. Additional keys are returned with it."""

    model_config = ConfigDict(extra="allow")
    id: str | int
    contents: str


class Retrieve(BaseModel):
    """Body of a request."""

    model_config = ConfigDict(extra="forbid")
    query: str | None = None
    queries: list[str] | None = None
    topk: PositiveInt = 3
    return_scores: bool = True


class Index:
    """In-memory index of documents.

    Score: BM25 in the form of Lucene (Kamphuis et al. 2020, https://doi.org/10.1007/978-3-030-45442-5_4), k1 = 1.5, b =
    0.75, over lower-case words of two letters or more without English stop words.
    """

    def __init__(self, documents: Sequence[Document]):
        if not documents:
            raise ConfigError("the corpus has no documents; give a file with one JSON object per line")
        self._documents = documents
        self._bm25 = bm25s.BM25(method="lucene", k1=1.5, b=0.75)
        self._bm25.index(
            bm25s.tokenize([document.contents for document in documents], show_progress=False), show_progress=False
        )

    def search(self, query: str, topk: int) -> list[tuple[Document, float]]:
        """Return up to `topk` best documents and their scores. Documents with equal scores keep their order."""
        words = [word for word in _words(query) if word in self._bm25.vocab_dict]
        if not words:
            return []
        scores = self._bm25.get_scores(words)
        order = np.argsort(-scores, kind="stable")[:topk]
        return [(self._documents[i], float(scores[i])) for i in order if scores[i] > 0]


def read_corpus(path: Path) -> list[Document]:
    """Read the documents of a file. Raises ConfigError for an unreadable file and for an invalid line."""
    try:
        return list(_documents(path))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); give a file of documents") from error


def create_app(index: Index) -> FastAPI:
    """Create the server."""
    app = FastAPI(title="Retrieval")

    @app.post("/retrieve")
    def retrieve(body: Retrieve) -> dict[str, Any]:
        queries = body.queries if body.queries is not None else [body.query]
        if (body.query is None) == (body.queries is None):
            raise HTTPException(422, "give either query, a text, or queries, a list of texts")
        found = [index.search(query, body.topk) for query in queries if query is not None]
        if not body.return_scores:
            return {"result": [[document.model_dump() for document, _ in hits] for hits in found]}
        return {
            "result": [
                [{"document": document.model_dump(), "score": score} for document, score in hits] for hits in found
            ]
        }

    return app


def main() -> int:
    """Serve the corpus that the command line names. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True, help="the documents, a JSON object per line")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()
    try:
        index = Index(read_corpus(arguments.corpus))
    except ConfigError as error:
        say_error(f"{parser.prog}: error: {error}")
        return 1
    uvicorn.run(create_app(index), host=arguments.host, port=arguments.port)
    return 0


def _words(text: str) -> list[str]:
    return [str(word) for word in bm25s.tokenize([text], return_ids=False, show_progress=False)[0]]


def _documents(path: Path) -> Iterator[Document]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield Document.model_validate(json.loads(line))
            except ValueError as error:
                raise ConfigError(f"{path}, line {number}: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
