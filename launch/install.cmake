# pending
