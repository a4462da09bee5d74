/* A module with one command for each way to specify keys. Declares its part of Redis's module interface. */
#include <stddef.h>
#include <stdint.h>

typedef struct RedisModuleCtx RedisModuleCtx;
typedef struct RedisModuleString RedisModuleString;
typedef struct RedisModuleCommand RedisModuleCommand;
typedef struct RedisModuleCallReply RedisModuleCallReply;
typedef int (*Handler)(RedisModuleCtx *, RedisModuleString **, int);

typedef struct {
    const char *notes;
    uint64_t flags;
    int begin_search_type;
    union {
        struct { int pos; } index;
        struct { const char *keyword; int startfrom; } keyword;
    } bs;
    int find_keys_type;
    union {
        struct { int lastkey; int keystep; int limit; } range;
        struct { int keynumidx; int firstkey; int keystep; } keynum;
    } fk;
} KeySpec;

typedef struct {
    int version;
    size_t size_of_history_entry, size_of_key_spec, size_of_arg;
} InfoVersion;

typedef struct {
    const InfoVersion *version;
    const char *summary, *complexity, *since;
    void *history;
    const char *tips;
    int arity;
    KeySpec *key_specs;
    void *args;
} CommandInfo;

static int (*GetApi)(const char *, void *);
static int (*SetModuleAttribs)(RedisModuleCtx *, const char *, int, int);
static int (*CreateCommand)(RedisModuleCtx *, const char *, Handler, const char *, int, int, int);
static RedisModuleCommand *(*GetCommand)(RedisModuleCtx *, const char *);
static int (*SetCommandInfo)(RedisModuleCommand *, const CommandInfo *);
static int (*WrongArity)(RedisModuleCtx *);
static int (*ReplyWithLongLong)(RedisModuleCtx *, long long);
static int (*ReplyWithCallReply)(RedisModuleCtx *, RedisModuleCallReply *);
static RedisModuleCallReply *(*Call)(RedisModuleCtx *, const char *, const char *, ...);

static int put(RedisModuleCtx *ctx, RedisModuleString **argv, int argc) {
    if (argc != 3) return WrongArity(ctx);
    return ReplyWithCallReply(ctx, Call(ctx, "SET", "!ss", argv[1], argv[2]));
}

static int second(RedisModuleCtx *ctx, RedisModuleString **argv, int argc) {
    if (argc != 3) return WrongArity(ctx);
    return ReplyWithCallReply(ctx, Call(ctx, "GET", "s", argv[2]));
}

static int pair(RedisModuleCtx *ctx, RedisModuleString **argv, int argc) {
    (void)argv;
    return ReplyWithLongLong(ctx, argc - 1);
}

static int count(RedisModuleCtx *ctx, RedisModuleString **argv, int argc) {
    if (argc < 3) return WrongArity(ctx);
    /* INCRBY of a missing key returns the increment. */
    RedisModuleString *number = argv[1];
    Call(ctx, "DEL", "c", "probe.count");
    int done = ReplyWithCallReply(ctx, Call(ctx, "INCRBY", "cs", "probe.count", number));
    Call(ctx, "DEL", "c", "probe.count");
    return done;
}

static int keyless(RedisModuleCtx *ctx, RedisModuleString **argv, int argc) {
    (void)argv;
    return ReplyWithLongLong(ctx, argc);
}

int RedisModule_OnLoad(RedisModuleCtx *ctx, RedisModuleString **argv, int argc) {
    (void)argv, (void)argc;
    GetApi = ((int (**)(const char *, void *))ctx)[0];
    GetApi("RedisModule_SetModuleAttribs", &SetModuleAttribs);
    GetApi("RedisModule_CreateCommand", &CreateCommand);
    GetApi("RedisModule_GetCommand", &GetCommand);
    GetApi("RedisModule_SetCommandInfo", &SetCommandInfo);
    GetApi("RedisModule_WrongArity", &WrongArity);
    GetApi("RedisModule_ReplyWithLongLong", &ReplyWithLongLong);
    GetApi("RedisModule_ReplyWithCallReply", &ReplyWithCallReply);
    GetApi("RedisModule_Call", &Call);
    SetModuleAttribs(ctx, "probe", 1, 1);
    if (CreateCommand(ctx, "probe.put", put, "write fast", 1, 1, 1) != 0) return 1;
    if (CreateCommand(ctx, "probe.second", second, "readonly", 2, 2, 1) != 0) return 1;
    if (CreateCommand(ctx, "probe.pair", pair, "readonly", 1, 2, 1) != 0) return 1;
    if (CreateCommand(ctx, "probe.count", count, "write", 0, 0, 0) != 0) return 1;
    if (CreateCommand(ctx, "probe.keyless", keyless, "readonly", 0, 0, 0) != 0) return 1;
    static const InfoVersion version = {1, 2 * sizeof(void *), sizeof(KeySpec), 10 * sizeof(void *)};
    /* flags: RO | ACCESS; begin_search: index; find_keys: keynum. */
    static KeySpec specs[] = {
        {.flags = 1 | (1 << 4), .begin_search_type = 2 /* index */, .bs.index.pos = 1, .find_keys_type = 3 /* keynum */,
         .fk.keynum = {0, 1, 1}},
        {0},
    };
    CommandInfo info = {.version = &version, .arity = -3, .key_specs = specs};
    if (SetCommandInfo(GetCommand(ctx, "probe.count"), &info) != 0) return 1;
    return 0;
}
