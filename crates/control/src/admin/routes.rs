//! Table of all routes, which the start page lists.

use std::fmt::Write as _;
use std::sync::Arc;

use axum::Router;
use axum::extract::rejection::JsonRejection;
use axum::extract::{ConnectInfo, Path, State};
use axum::http::header::{
    ACCEPT as ACCEPT_TYPES, CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, VARY, X_CONTENT_TYPE_OPTIONS,
};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, Uri};
use axum::middleware::{from_fn_with_state, map_response};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, get, post};
use axum::{Extension, Json};
use serde::Serialize;

use super::autoscale::AutoscaleRequest;
use super::guard::{AlreadyLogged, Guard, TokenFile, TokenPresented, Trusted, check};
use super::hot_copies::HotCopiesRequest;
use super::listener::Peer;
use super::moves::{
    AbortRequest, AddNodeRequest, BalanceRequest, GoalRequest, HotKeysReport, MaxRateRequest, MoveRequest, MovesReport,
    NodeRequest, Operation, OperationError, SourceOpsMaxRequest, SteerRequest,
};
use super::page::{Entry, counted, page};
use super::planner::{AutomationRequest, PlanRequest};
use super::report::{NodesReport, Source, StatusReport, TokenReport};
use super::rules::RulesRequest;
use crate::metrics;

type Shared = Arc<dyn Source>;

const HEALTH: &str = "/healthz";
const READY: &str = "/readyz";
const TOKEN: &str = "/api/v1/token";
const WHERE: &str = "/api/v1/where";
const COLOCATION: &str = "/api/v1/colocation";
const HOT_KEYS: &str = "/api/v1/hotkeys";
const LOAD: &str = "/api/v1/load";
const PLAN: &str = "/api/v1/plan";
const REPLAY: &str = "/api/v1/plan/history/{id}/replay";
const AUTOMATION: &str = "/api/v1/automation";
const RULES: &str = "/api/v1/rules";
const RULES_CHECK: &str = "/api/v1/rules/check";
const RULES_LEARN: &str = "/api/v1/rules/learn";
const AUTOSCALE: &str = "/api/v1/autoscale";
const HOT_COPIES: &str = "/api/v1/hot-copies";
const ACCEPT: &str = "/api/v1/nodes/{node}/accept";

/// Content security policy of the start page: permits its style, and nothing else.
const STYLED: &str = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'";

/// Path, purpose and handler of each route.
fn table() -> [(&'static str, &'static str, MethodRouter<Shared>); 35] {
    [
        ("/", "this page", get(index)),
        ("/metrics", "all metrics in the text format of Prometheus", get(metrics_page)),
        (HEALTH, "200 while the process is alive", get(health)),
        (
            READY,
            "200 while some slot can be served, with a list of the others; 503 if none can, or the router waits as a standby, starts or stops",
            get(ready),
        ),
        (TOKEN, "the file with the generated token for changes, if there is one; as JSON", get(token_file)),
        ("/api/v1/status", "state of the router and its nodes, as JSON", get(status)),
        ("/api/v1/nodes", "the nodes, as JSON; POST {\"address\"} adds one", get(nodes).post(add_node)),
        (
            ACCEPT,
            "POST: serve a node that returned empty, or follow the server that claims to be its primary",
            post(accept),
        ),
        ("/api/v1/nodes/{node}/drain", "POST {\"dry_run\"}: move everything away from a node", post(drain_node)),
        ("/api/v1/nodes/{node}/undrain", "POST: allow a drained node to get slots again", post(undrain_node)),
        ("/api/v1/nodes/{node}/remove", "POST: remove a node that owns no slots", post(remove_node)),
        ("/api/v1/balance", "POST {\"dry_run\"}: distribute the slots by weight", post(balance)),
        ("/api/v1/slots", "the slot map: ranges by node, slots in transit, placement overrides; as JSON", get(slots)),
        (
            "/api/v1/misplaced",
            "misplaced keys in a sample of each node, which no client finds; as JSON",
            get(misplaced),
        ),
        (WHERE, "locations of keys: ?key=NAME, repeatable; as JSON", get(locate_keys)),
        (
            COLOCATION,
            "keys that commands have brought together, their groups and moves, and refused commands; with names if the request carries the token; as JSON",
            get(colocation),
        ),
        (
            HOT_KEYS,
            "the most used keys of each node: ?count=10; with names if the request carries the token; as JSON",
            get(hot_keys),
        ),
        (LOAD, "the load of each node, and the slots that are used most, as JSON", get(load)),
        (
            HOT_COPIES,
            "state of hot copies, as JSON; POST {\"do\": \"evict\", and \"key\", \"prefix\" or \"all\"}, {\"do\": \"off\"} or {\"do\": \"on\"}",
            get(hot_copies).post(steer_hot_copies),
        ),
        (
            PLAN,
            "the planner's current plan: ?load=2&without=NODE&policy=NAME, as JSON; POST {\"without\", \"policy\"} applies it",
            get(plan).post(apply_plan),
        ),
        ("/api/v1/plan/history", "decisions of the planner and their outcomes, as JSON", get(plan_history)),
        (REPLAY, "repeat a decision on its stored input, as JSON", get(replay)),
        (
            AUTOSCALE,
            "target number of nodes and the reasons, as JSON; POST {\"do\": \"set-nodes\", \"nodes\"}, {\"do\": \"pause\"} or {\"do\": \"resume\"}",
            get(autoscale).post(steer_autoscale),
        ),
        (
            AUTOMATION,
            "whether automation is on, as JSON; POST {\"do\": \"off\"} or {\"do\": \"on\"}",
            get(automation).post(steer_automation),
        ),
        (
            RULES,
            "placement rules and their adoption, as JSON; POST {\"do\": \"adopt\", \"rules\", \"dry_run\"}, {\"do\": \"pause\"}, {\"do\": \"resume\"} or {\"do\": \"abandon\"}",
            get(rules).post(steer_rules),
        ),
        (
            RULES_LEARN,
            "rules proposed from keys that clients use together; only their number without the token; as JSON",
            get(learn_rules),
        ),
        (RULES_CHECK, "the effect of the rules on keys: ?key=NAME, repeatable; as JSON", get(check_rules)),
        (
            "/api/v1/moves",
            "moves, as JSON; POST {\"from\", \"to\", \"slots\" or \"all\"} starts one",
            get(moves).post(begin_move),
        ),
        ("/api/v1/moves/{id}/pause", "POST: finish the slots being moved now, then pause", post(pause)),
        ("/api/v1/moves/{id}/resume", "POST: resume it", post(resume)),
        (
            "/api/v1/moves/{id}/abort",
            "POST {\"abandon\": \"target\" or \"source\", \"dry_run\"}: end it, optionally without a lost node",
            post(abort),
        ),
        ("/api/v1/moves/{id}/goal", "POST {\"goal\"}: change the goal", post(goal)),
        (
            "/api/v1/moves/{id}/max-rate",
            "POST {\"max_rate\"}: change the maximum rate, in bytes per second",
            post(max_rate),
        ),
        (
            "/api/v1/moves/{id}/source-ops-max",
            "POST {\"source_ops_max\"}: change the limit of the source, for protocols as published (builds with the feature research)",
            post(source_ops_max),
        ),
        ("/api/v1/upgrade", "POST: replace the process by a new one, in front of a cluster", post(upgrade)),
    ]
}

/// Whether the path needs no token: health checks, and the location of the token file.
pub(super) fn needs_no_token(path: &str) -> bool {
    path == HEALTH || path == READY || path == TOKEN
}

pub(super) fn router(source: Shared, guard: Arc<Guard>) -> Router {
    table()
        .into_iter()
        .fold(Router::new(), |router, (path, _, handler)| router.route(path, handler))
        .fallback(unknown_path)
        .method_not_allowed_fallback(unknown_method)
        .layer(from_fn_with_state(guard, check))
        .layer(map_response(harden))
        .with_state(source)
}

/// Builds an error response in the path's format: JSON below `/api/`, else text.
pub(super) fn refuse(path: &str, status: StatusCode, message: &str) -> Response {
    #[derive(Serialize)]
    struct Error<'a> {
        error: &'a str,
    }
    if path.starts_with("/api/") {
        (status, Json(Error { error: message })).into_response()
    } else {
        (status, format!("{message}\n")).into_response()
    }
}

async fn index(
    State(source): State<Shared>,
    Extension(TokenFile(file)): Extension<TokenFile>,
    ConnectInfo(Peer(peer)): From,
) -> Result<Response, Response> {
    let who = format!("the admin API, from {peer}");
    let (status, moves) =
        query_source("/", source, move |source| (source.status(), source.operate(Operation::Moves, &who))).await?;
    // While the router is starting there is no report, so show no moves.
    let moves: MovesReport = moves.ok().and_then(|moves| serde_json::from_value(moves).ok()).unwrap_or_default();
    let entry = |(path, purpose, _): (&'static str, &'static str, _)| {
        // A link is a GET without parameters.
        Entry {
            path,
            purpose,
            is_link: !purpose.starts_with("POST") && !matches!(path, WHERE | RULES_CHECK) && !path.contains('{'),
        }
    };
    let entries: Vec<Entry> = table().into_iter().map(entry).collect();
    let headers = [(CONTENT_TYPE, "text/html; charset=utf-8"), (CONTENT_SECURITY_POLICY, STYLED)];
    Ok((headers, page(&status, &moves, file.as_deref(), &entries)).into_response())
}

async fn metrics_page(State(source): State<Shared>, headers: HeaderMap) -> Result<Response, Response> {
    let text = query_source("/metrics", source, |source| source.metrics()).await?;
    let open =
        metrics::prefers_openmetrics(headers.get_all(ACCEPT_TYPES).iter().filter_map(|accept| accept.to_str().ok()));
    let (content_type, text) =
        if open { (metrics::OPENMETRICS, text) } else { (metrics::CLASSIC, metrics::classic(&text)) };
    // Caches must not return one format to readers of the other.
    Ok(([(CONTENT_TYPE, content_type), (VARY, "Accept")], text).into_response())
}

async fn health() -> &'static str {
    "ok\n"
}

async fn token_file(Extension(TokenFile(file)): Extension<TokenFile>) -> Json<TokenReport> {
    Json(TokenReport { file })
}

async fn ready(
    State(source): State<Shared>,
    Extension(Trusted(trusted)): Extension<Trusted>,
) -> Result<Response, Response> {
    let readiness = query_source(READY, source, |source| source.ready()).await?;
    let mut text = String::from(if readiness.is_ready() { "ready\n" } else { "not ready\n" });
    if readiness.standby.is_some() {
        text.push_str("waiting as a standby\n");
    }
    if trusted {
        if let Some(why) = &readiness.standby {
            let _ = writeln!(text, "{why}");
        }
        if readiness.draining {
            text.push_str("this router is draining: it is shutting down\n");
        }
        for node in &readiness.not_ready {
            let _ = writeln!(text, "node {} ({}): {}", node.address, counted(node.slots, "slot"), node.reason);
        }
        for warning in readiness.warnings.iter().chain(&readiness.automation) {
            let _ = writeln!(text, "{warning}");
        }
    }
    let status = if readiness.is_ready() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    Ok((status, text).into_response())
}

async fn status(State(source): State<Shared>) -> Result<Response, Response> {
    /// Adds summaries that scripts would otherwise have to compute.
    #[derive(Serialize)]
    struct Body {
        ready: bool,
        /// Every key can be used.
        whole: bool,
        slots_unserved: u64,
        #[serde(flatten)]
        status: StatusReport,
    }
    let status = query_source("/api/v1/status", source, |source| source.status()).await?;
    let readiness = status.readiness();
    let body = Body {
        ready: readiness.is_ready(),
        whole: readiness.is_complete(),
        slots_unserved: readiness.slots_unserved(),
        status,
    };
    Ok(Json(body).into_response())
}

async fn nodes(State(source): State<Shared>) -> Result<Json<NodesReport>, Response> {
    let status = query_source("/api/v1/nodes", source, |source| source.status()).await?;
    Ok(Json(NodesReport { epoch: status.epoch, nodes: status.nodes, limited: status.limited }))
}

async fn accept(State(source): State<Shared>, Path(node): Path<String>) -> Result<Response, Response> {
    #[derive(Serialize)]
    struct Body {
        accepted: String,
    }
    let name = node.clone();
    match query_source(ACCEPT, source, move |source| source.accept(&name)).await? {
        Ok(()) => Ok(Json(Body { accepted: node }).into_response()),
        // Only the name in the path can be wrong.
        Err(OperationError::Invalid(why)) => Err(refuse(ACCEPT, StatusCode::NOT_FOUND, &why)),
        Err(refused) => Err(refuse(ACCEPT, status_of(&refused), refused.text())),
    }
}

fn status_of(refused: &OperationError) -> StatusCode {
    match refused {
        OperationError::Invalid(_) => StatusCode::BAD_REQUEST,
        OperationError::Conflict(_) => StatusCode::CONFLICT,
        OperationError::Failed(_) => StatusCode::INTERNAL_SERVER_ERROR,
        OperationError::Unavailable(_) => StatusCode::SERVICE_UNAVAILABLE,
    }
}

async fn slots(State(source): State<Shared>, from: From) -> Result<Response, Response> {
    operate("/api/v1/slots", source, from, Operation::Slots).await
}

async fn colocation(
    State(source): State<Shared>,
    Extension(TokenPresented(named)): Extension<TokenPresented>,
    from: From,
) -> Result<Response, Response> {
    operate(COLOCATION, source, from, Operation::Colocation { named }).await
}

async fn hot_keys(
    State(source): State<Shared>,
    Extension(TokenPresented(named)): Extension<TokenPresented>,
    uri: Uri,
    from: From,
) -> Result<Response, Response> {
    let count =
        uri.query().map_or(Some(HotKeysReport::KEYS), |query| HotKeysReport::count(query.strip_prefix("count=")?));
    let Some(keys) = count else {
        return Err(refuse(
            HOT_KEYS,
            StatusCode::BAD_REQUEST,
            &format!("count is a number from 1 to {}", HotKeysReport::KEYS_MAX),
        ));
    };
    operate(HOT_KEYS, source, from, Operation::HotKeys { keys, named }).await
}

async fn load(State(source): State<Shared>, from: From) -> Result<Response, Response> {
    operate(LOAD, source, from, Operation::Load).await
}

/// Parses `?load=2&without=NODE&policy=NAME`.
#[allow(clippy::result_large_err)] // same type as the async handlers
fn parse_plan_query(query: &str, named: bool) -> Result<PlanRequest, Response> {
    let wrong = |why: &str| refuse(PLAN, StatusCode::BAD_REQUEST, why);
    let mut request = PlanRequest { named, ..PlanRequest::default() };
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=').ok_or_else(|| wrong("write ?name=value"))?;
        let text = decoded(value)
            .and_then(|bytes| String::from_utf8(bytes).ok())
            .ok_or_else(|| wrong("a value is not encoded as in a URL"))?;
        match name {
            "load" => request.load = Some(text.parse().map_err(|_| wrong("load is a number, such as 2 or 0.5"))?),
            "without" => request.without = Some(text),
            "policy" => request.policy = Some(text),
            other => return Err(wrong(&format!("unknown parameter {other:?}; known are load, without and policy"))),
        }
    }
    Ok(request)
}

async fn plan(
    State(source): State<Shared>,
    Extension(TokenPresented(named)): Extension<TokenPresented>,
    uri: Uri,
    from: From,
) -> Result<Response, Response> {
    let request = parse_plan_query(uri.query().unwrap_or_default(), named)?;
    operate(PLAN, source, from, Operation::Plan(request)).await
}

async fn apply_plan(
    State(source): State<Shared>,
    Extension(TokenPresented(named)): Extension<TokenPresented>,
    from: From,
    given: GivenOrNot<PlanRequest>,
) -> Result<Response, Response> {
    let request = PlanRequest { apply: true, named, ..body_or_default(PLAN, given)? };
    operate(PLAN, source, from, Operation::Plan(request)).await
}

async fn plan_history(
    State(source): State<Shared>,
    Extension(TokenPresented(named)): Extension<TokenPresented>,
    from: From,
) -> Result<Response, Response> {
    operate("/api/v1/plan/history", source, from, Operation::PlanHistory { named }).await
}

async fn replay(
    State(source): State<Shared>,
    Extension(TokenPresented(named)): Extension<TokenPresented>,
    from: From,
    Path(id): Path<String>,
) -> Result<Response, Response> {
    let id = id
        .parse()
        .map_err(|_| refuse(REPLAY, StatusCode::BAD_REQUEST, "the number of a decision is a whole number"))?;
    operate(REPLAY, source, from, Operation::Replay { id, named }).await
}

async fn automation(State(source): State<Shared>, from: From) -> Result<Response, Response> {
    operate(AUTOMATION, source, from, Operation::Automation).await
}

async fn steer_automation(
    State(source): State<Shared>,
    from: From,
    given: Given<AutomationRequest>,
) -> Result<Response, Response> {
    let request = body(AUTOMATION, given)?;
    operate(AUTOMATION, source, from, Operation::SteerAutomation(request)).await
}

async fn autoscale(State(source): State<Shared>, from: From) -> Result<Response, Response> {
    operate(AUTOSCALE, source, from, Operation::Autoscale).await
}

async fn steer_autoscale(
    State(source): State<Shared>,
    from: From,
    given: Given<AutoscaleRequest>,
) -> Result<Response, Response> {
    let request = body(AUTOSCALE, given)?;
    operate(AUTOSCALE, source, from, Operation::SteerAutoscale(request)).await
}

async fn hot_copies(State(source): State<Shared>, from: From) -> Result<Response, Response> {
    operate(HOT_COPIES, source, from, Operation::HotCopies).await
}

async fn steer_hot_copies(
    State(source): State<Shared>,
    from: From,
    given: Given<HotCopiesRequest>,
) -> Result<Response, Response> {
    let order =
        body(HOT_COPIES, given)?.order().map_err(|refused| refuse(HOT_COPIES, status_of(&refused), refused.text()))?;
    operate(HOT_COPIES, source, from, Operation::SteerHotCopies(order)).await
}

async fn rules(State(source): State<Shared>, from: From) -> Result<Response, Response> {
    operate(RULES, source, from, Operation::Rules).await
}

async fn check_rules(State(source): State<Shared>, from: From, uri: Uri) -> Result<Response, Response> {
    let keys = parse_keys(uri.query().unwrap_or_default())
        .ok_or_else(|| refuse(RULES_CHECK, StatusCode::BAD_REQUEST, WHICH_KEYS))?;
    operate(RULES_CHECK, source, from, Operation::CheckRules(keys)).await
}

async fn learn_rules(
    State(source): State<Shared>,
    Extension(TokenPresented(named)): Extension<TokenPresented>,
    from: From,
) -> Result<Response, Response> {
    operate(RULES_LEARN, source, from, Operation::LearnRules { named }).await
}

async fn steer_rules(
    State(source): State<Shared>,
    from: From,
    given: Given<RulesRequest>,
) -> Result<Response, Response> {
    let order = body(RULES, given)?.order().map_err(|refused| refuse(RULES, status_of(&refused), refused.text()))?;
    operate(RULES, source, from, Operation::SteerRules(order)).await
}

async fn misplaced(State(source): State<Shared>, from: From) -> Result<Response, Response> {
    operate("/api/v1/misplaced", source, from, Operation::Misplaced).await
}

/// Parses `?key=a&key=b`. Names of keys are bytes, so they may be no valid text.
fn parse_keys(query: &str) -> Option<Vec<Vec<u8>>> {
    let named = |pair: &str| decoded(pair.strip_prefix("key=")?);
    let keys: Vec<Vec<u8>> = query.split('&').filter(|pair| !pair.is_empty()).map(named).collect::<Option<_>>()?;
    if keys.is_empty() { None } else { Some(keys) }
}

fn decoded(text: &str) -> Option<Vec<u8>> {
    let mut rest = text.as_bytes();
    let mut bytes = Vec::with_capacity(rest.len());
    while let Some((first, after)) = rest.split_first() {
        rest = after;
        match (first, after) {
            (b'%', [high, low, after @ ..]) => {
                let digit = |byte: &u8| char::from(*byte).to_digit(16);
                bytes.push(u8::try_from(digit(high)? * 16 + digit(low)?).ok()?);
                rest = after;
            }
            (b'%', _) => return None,
            (b'+', _) => bytes.push(b' '),
            (byte, _) => bytes.push(*byte),
        }
    }
    Some(bytes)
}

async fn locate_keys(State(source): State<Shared>, from: From, uri: Uri) -> Result<Response, Response> {
    let keys = parse_keys(uri.query().unwrap_or_default())
        .ok_or_else(|| refuse(WHERE, StatusCode::BAD_REQUEST, WHICH_KEYS))?;
    operate(WHERE, source, from, Operation::Where(keys)).await
}

const WHICH_KEYS: &str = "which keys? Give ?key=NAME, repeatable, with special characters as %XX";

type Given<T> = Result<Json<T>, JsonRejection>;
type GivenOrNot<T> = Result<Option<Json<T>>, JsonRejection>;
type From = ConnectInfo<Peer>;

async fn moves(State(source): State<Shared>, from: From) -> Result<Response, Response> {
    operate("/api/v1/moves", source, from, Operation::Moves).await
}

async fn begin_move(State(source): State<Shared>, from: From, given: Given<MoveRequest>) -> Result<Response, Response> {
    let path = "/api/v1/moves";
    operate(path, source, from, Operation::Move(body(path, given)?)).await
}

async fn add_node(
    State(source): State<Shared>,
    from: From,
    given: Given<AddNodeRequest>,
) -> Result<Response, Response> {
    let path = "/api/v1/nodes";
    operate(path, source, from, Operation::AddNode(body(path, given)?)).await
}

async fn drain_node(
    State(source): State<Shared>,
    from: From,
    node: Path<String>,
    given: GivenOrNot<BalanceRequest>,
) -> Result<Response, Response> {
    let path = "/api/v1/nodes/{node}/drain";
    let BalanceRequest { dry_run, how, .. } = body_or_default(path, given)?;
    operate(path, source, from, Operation::DrainNode(NodeRequest { address: node.0, dry_run, how })).await
}

async fn undrain_node(State(source): State<Shared>, from: From, node: Path<String>) -> Result<Response, Response> {
    let path = "/api/v1/nodes/{node}/undrain";
    operate(path, source, from, Operation::UndrainNode(NodeRequest { address: node.0, ..NodeRequest::default() })).await
}

async fn remove_node(State(source): State<Shared>, from: From, node: Path<String>) -> Result<Response, Response> {
    let path = "/api/v1/nodes/{node}/remove";
    operate(path, source, from, Operation::RemoveNode(NodeRequest { address: node.0, ..NodeRequest::default() })).await
}

async fn balance(
    State(source): State<Shared>,
    from: From,
    given: GivenOrNot<BalanceRequest>,
) -> Result<Response, Response> {
    let path = "/api/v1/balance";
    operate(path, source, from, Operation::Balance(body_or_default(path, given)?)).await
}

async fn upgrade(State(source): State<Shared>, from: From) -> Result<Response, Response> {
    operate("/api/v1/upgrade", source, from, Operation::Upgrade).await
}

async fn pause(State(source): State<Shared>, from: From, id: Path<String>) -> Result<Response, Response> {
    steer(source, from, &id, SteerRequest::Pause).await
}

async fn resume(State(source): State<Shared>, from: From, id: Path<String>) -> Result<Response, Response> {
    steer(source, from, &id, SteerRequest::Resume).await
}

async fn abort(
    State(source): State<Shared>,
    from: From,
    id: Path<String>,
    given: GivenOrNot<AbortRequest>,
) -> Result<Response, Response> {
    let what = SteerRequest::Abort(body_or_default("/api/v1/moves/{id}/abort", given)?);
    steer(source, from, &id, what).await
}

async fn goal(
    State(source): State<Shared>,
    from: From,
    id: Path<String>,
    given: Given<GoalRequest>,
) -> Result<Response, Response> {
    let what = SteerRequest::Goal(body("/api/v1/moves/{id}/goal", given)?.goal);
    steer(source, from, &id, what).await
}

async fn max_rate(
    State(source): State<Shared>,
    from: From,
    id: Path<String>,
    given: Given<MaxRateRequest>,
) -> Result<Response, Response> {
    let what = SteerRequest::MaxRate(body("/api/v1/moves/{id}/max-rate", given)?.max_rate);
    steer(source, from, &id, what).await
}

async fn source_ops_max(
    State(source): State<Shared>,
    from: From,
    id: Path<String>,
    given: Given<SourceOpsMaxRequest>,
) -> Result<Response, Response> {
    let what = SteerRequest::SourceOpsMax(body("/api/v1/moves/{id}/source-ops-max", given)?.source_ops_max);
    steer(source, from, &id, what).await
}

async fn steer(source: Shared, from: From, id: &str, what: SteerRequest) -> Result<Response, Response> {
    let path = "/api/v1/moves";
    let id = id.parse().map_err(|_| {
        refuse(path, StatusCode::BAD_REQUEST, "the number of a move is a whole number; GET /api/v1/moves lists them")
    })?;
    operate(path, source, from, Operation::Steer { id, what }).await
}

/// Unwraps the body, or returns an error response.
#[allow(clippy::result_large_err)] // same type as the async handlers
fn body<T>(path: &str, given: Given<T>) -> Result<T, Response> {
    given
        .map(|Json(value)| value)
        .map_err(|rejection| refuse(path, rejection.status(), &describe_rejection(&rejection)))
}

/// Describes a rejected body without axum's own wording.
fn describe_rejection(rejection: &JsonRejection) -> String {
    let text = rejection.body_text();
    let JsonRejection::JsonDataError(_) = rejection else { return text };
    let text = text.split_once(": ").map_or(text.as_str(), |(_, what)| what);
    let text = text.split_once(" at line ").map_or(text, |(what, _)| what);
    match text.split_once("unknown field ").and_then(|(_, rest)| rest.split_once(", expected ")) {
        Some((field, known)) => {
            let known = known.strip_prefix("one of ").unwrap_or(known);
            format!("unknown field {field}; it takes: {known}")
        }
        None => text.to_owned(),
    }
}

/// Unwraps an optional body, or returns an error response.
#[allow(clippy::result_large_err)]
fn body_or_default<T: Default>(path: &str, given: GivenOrNot<T>) -> Result<T, Response> {
    match given {
        Ok(given) => Ok(given.map(|Json(value)| value).unwrap_or_default()),
        Err(rejection) => Err(refuse(path, rejection.status(), &describe_rejection(&rejection))),
    }
}

async fn operate(
    path: &str,
    source: Shared,
    ConnectInfo(Peer(peer)): From,
    operation: Operation,
) -> Result<Response, Response> {
    let who = format!("the admin API, from {peer}");
    match query_source(path, source, move |source| source.operate(operation, &who)).await? {
        Ok(value) => Ok((Extension(AlreadyLogged), Json(value)).into_response()),
        Err(refused) => {
            Err((Extension(AlreadyLogged), refuse(path, status_of(&refused), refused.text())).into_response())
        }
    }
}

/// Queries the source on a blocking thread, because it may wait for a lock that a worker holds.
async fn query_source<T: Send + 'static>(
    path: &str,
    source: Shared,
    question: impl FnOnce(&dyn Source) -> T + Send + 'static,
) -> Result<T, Response> {
    tokio::task::spawn_blocking(move || question(&*source)).await.map_err(|error| {
        tracing::error!(path, %error, "an admin request failed");
        refuse(path, StatusCode::INTERNAL_SERVER_ERROR, "this request failed; see the log of switchyard")
    })
}

async fn unknown_path(uri: Uri) -> Response {
    let paths: Vec<&str> = table().iter().map(|(path, ..)| *path).collect();
    let message = format!("there is nothing at this path; known paths: {}", paths.join(" "));
    refuse(uri.path(), StatusCode::NOT_FOUND, &message)
}

async fn unknown_method(method: Method, uri: Uri) -> Response {
    let message = match method {
        Method::GET => "this path changes something: use POST".to_owned(),
        _ => format!("this path does not support {method}: see the header Allow"),
    };
    refuse(uri.path(), StatusCode::METHOD_NOT_ALLOWED, &message)
}

/// Sets headers so that caches do not store responses, and browsers do not guess content types.
async fn harden(mut response: Response) -> Response {
    let headers = response.headers_mut();
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers
        .entry(CONTENT_SECURITY_POLICY)
        .or_insert(HeaderValue::from_static("default-src 'none'; frame-ancestors 'none'"));
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_in_a_query_are_bytes() {
        let keys = |query| parse_keys(query);
        assert_eq!(keys("key=user%3A1&key=a+b&key=%FF"), Some(vec![b"user:1".to_vec(), b"a b".to_vec(), vec![0xff]]));
        assert_eq!(keys("key="), Some(vec![Vec::new()]), "the empty key is one");
        for wrong in ["", "name=x", "key=%F", "key=%zz"] {
            assert_eq!(keys(wrong), None, "{wrong}");
        }
    }
}
