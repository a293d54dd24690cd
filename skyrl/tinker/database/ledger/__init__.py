"""The ledger: what was used and by whom, and who did what with checkpoints.

charges           what a request used, added to its session's, run's and hour's row in the transaction that answers it
sample_charges    when those of samples are stored, which have no other transaction
charged_samples   what each sample was charged until its answer is handed out; taken back if that is lost
audit             events: a row each
billing           the answers of the billing and audit routes
"""
