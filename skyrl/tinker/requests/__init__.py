"""A queued request's life in the API process, from its admission to the answer that a client retrieves.

`queue` is the door; `training` logs and sends, `samples` sends, `outcomes` stores what comes back, `futures` answers,
`engine_models` and `replay` bring models to the engine, `engine_events` says what each of its frames means.
"""
