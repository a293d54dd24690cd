"""The only SQL: tables, migrations, the log of requests, and every query.

database, retrying_writer    reads and writes in threads, and tries again where the database does not answer
fence                        one server at a time
tables, decisions            rows, and what the server chose for a request
ledger                       what was used, and who did what
log                          the write-ahead log of requests
queries                      what is read and written of everything else
answers, fair_reads          large answers and long lists, read in fair turns
"""
