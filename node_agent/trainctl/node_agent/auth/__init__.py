"""Keys and roles: who may connect, what each sender may do, revocation and the audit."""
