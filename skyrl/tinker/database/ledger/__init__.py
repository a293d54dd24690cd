"""The ledger: usage, and audit events of checkpoints.

charges           usage of a request, added to the row of its session, run and hour when its answer is stored
sample_charges    charge of each sample, stored until its answer is handed out; refunded if the answer is lost
audit             audit events, one row each
billing           answers of the billing and audit routes
tenant_usage      usage of all tenants, for operators
"""
