"""What a node takes from and does for other peers of the DHT, who are strangers.

`connection` bounds calls before they are decoded, `budgets` their number, `calls` answers them, `storage` keeps the
records, `origins` tells which peers share an address, and `serializer` decodes values.
"""
