"""All SQL: tables, migrations, the log of requests, and every query.

database, retrying_writer    reads and writes in threads, and retries while the database is unavailable
fence                        one server at a time
tables, decisions            rows, and the server's choices for a request
ledger                       usage and audit
log                          the write-ahead log of requests
queries                      reads and writes of everything else
answers, fair_reads          reads of large answers and long lists, fairly between tenants
"""
