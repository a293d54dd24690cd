"""Services for environments: `http` sends requests to servers, `retrieval` is a search server, `sqlite` a database."""
