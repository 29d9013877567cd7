-- agent.db as the first schema had it: a command that ended, one that is open, a run.
PRAGMA user_version=1;
BEGIN TRANSACTION;
CREATE TABLE commands (
  id TEXT PRIMARY KEY, digest TEXT NOT NULL, verb TEXT NOT NULL, args TEXT NOT NULL, by TEXT NOT NULL, run TEXT,
  node TEXT, if_plan INTEGER, received_at REAL NOT NULL, ttl_seconds REAL NOT NULL, state TEXT NOT NULL,
  step INTEGER, reason TEXT NOT NULL DEFAULT '', field TEXT, before TEXT, after TEXT, ended_at REAL,
  plan_version INTEGER
) WITHOUT ROWID;
INSERT INTO "commands" VALUES('8b7c6d5e-0000-4000-8000-000000000001','105eb00e146afc6de7e9ea47d5a5aef158063da17d644321e3b286edbdee13bb','resize-batch','{"micro":8}','anna',NULL,'a',NULL,1000.0,60.0,'applied',17,'',NULL,'8','4',1001.0,2);
INSERT INTO "commands" VALUES('8b7c6d5e-0000-4000-8000-000000000002','663e344a1ba6938e254e2335dba99193d4cbcc9f3faedde4428f73eeb2f65dd8','checkpoint','{}','anna',NULL,NULL,NULL,1002.0,60.0,'accepted',NULL,'',NULL,NULL,NULL,NULL,NULL);
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
INSERT INTO "meta" VALUES('generation','1.4');
CREATE TABLE runs (
  run TEXT PRIMARY KEY, name TEXT NOT NULL, directory TEXT NOT NULL, started_at REAL NOT NULL, state TEXT NOT NULL,
  reason TEXT NOT NULL DEFAULT ''
) WITHOUT ROWID;
INSERT INTO "runs" VALUES('demo-1','demo','/state/runs/demo-1',999.0,'running','');
COMMIT;
