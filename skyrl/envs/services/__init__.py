"""Services that environments use: `http` asks servers, `retrieval` is one to search in, `sqlite` runs queries."""
