//! Manifests for Kubernetes (`contrib/kubernetes/`): schemas, agreement with each other, and the configuration in them.

use std::collections::BTreeSet;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

use serde_json::Value;
use tempfile::TempDir;

use crate::cluster_storage::Members;
use crate::support::sandbox::file;
use crate::support::{Client, Router, RouterOptions, direct, ok};

/// Prints the manifests of a folder as JSON, after a check against the schemas of the oldest supported version of
/// Kubernetes and of the newest known one.
const CHECK: &str = "
import json, pathlib, sys
try:
    import kubernetes_validate, yaml
except ImportError as why:
    print(why, file=sys.stderr)
    sys.exit(77)
manifests = []
for path in sorted(pathlib.Path(sys.argv[1]).iterdir()):
    for manifest in yaml.safe_load_all(path.read_text()):
        for version in ('1.30', kubernetes_validate.latest_version()):
            kubernetes_validate.validate(manifest, version, strict=True)
        manifests.append(manifest)
print(json.dumps(manifests))
";

/// Runs [`CHECK`]. `None` without PyPI's kubernetes-validate, which scripts/install-deps.sh installs in the target
/// directory.
fn check(folder: &Path) -> Option<Output> {
    let target = Path::new(env!("CARGO_BIN_EXE_switchyard")).ancestors().nth(2).expect("the target directory");
    let checked = Command::new(target.join("tools/bin/python")).args(["-c", CHECK]).arg(folder).output();
    if let Ok(output) = checked
        && output.status.code() != Some(77)
    {
        return Some(output);
    }
    let why = "kubernetes-validate is not installed (scripts/install-deps.sh test)";
    // Bypasses the test runner, which hides the output of tests that pass.
    let _ = writeln!(std::io::stderr(), "not tried here: contrib/kubernetes: {why}");
    None
}

/// The manifests, if they can be read here.
struct Manifests(Vec<Value>);

impl Manifests {
    fn read() -> Option<Manifests> {
        let checked = check(&file("contrib/kubernetes"))?;
        assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stderr));
        Some(Manifests(serde_json::from_slice(&checked.stdout).expect("JSON")))
    }

    fn of_kind(&self, kind: &str) -> &Value {
        let mut found = self.0.iter().filter(|manifest| manifest["kind"] == kind);
        let only = found.next().filter(|_| found.next().is_none());
        only.unwrap_or_else(|| panic!("not one {kind}"))
    }

    fn pod(&self) -> &Value {
        &self.of_kind("Deployment")["spec"]["template"]
    }

    fn container(&self) -> &Value {
        &self.pod()["spec"]["containers"][0]
    }

    fn config(&self) -> &str {
        text(&self.of_kind("ConfigMap")["data"]["switchyard.toml"])
    }

    /// Writes this configuration, and secrets for it, into a folder.
    fn mount(&self, config: &str) -> TempDir {
        let dir = tempfile::tempdir().expect("a folder");
        std::fs::write(dir.path().join("switchyard.toml"), config).expect("written");
        for line in self.config().lines() {
            let Some((_, name)) = line.split_once("-file = ") else { continue };
            let mode = self.pod()["spec"]["volumes"][0]["projected"]["defaultMode"].as_u64();
            let mode = mode.and_then(|mode| u32::try_from(mode).ok()).expect("a mode");
            let mut options = std::fs::OpenOptions::new();
            let path = dir.path().join(name.trim_matches('"'));
            let mut secret = options.create(true).write(true).mode(mode).open(path).expect("a file");
            secret.write_all(b"a-secret-of-a-test\n").expect("written");
        }
        dir
    }
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_else(|| panic!("no text: {value}"))
}

/// Labels or selectors as text.
fn labels(value: &Value) -> BTreeSet<String> {
    value.as_object().expect("labels").iter().map(|(key, value)| format!("{key}={}", text(value))).collect()
}

#[test]
fn manifests_for_kubernetes_are_valid_and_agree() {
    let Some(manifests) = Manifests::read() else { return };
    let deployment = &manifests.of_kind("Deployment")["spec"];
    assert!(deployment["replicas"].as_u64() >= Some(2), "one router has no successor");
    let pod = labels(&manifests.pod()["metadata"]["labels"]);
    for selector in [
        &deployment["selector"]["matchLabels"],
        &manifests.of_kind("Service")["spec"]["selector"],
        &manifests.of_kind("PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        &manifests.pod()["spec"]["topologySpreadConstraints"][0]["labelSelector"]["matchLabels"],
    ] {
        assert!(labels(selector).is_subset(&pod), "{selector}");
    }

    let config: toml::Table = manifests.config().parse().expect("TOML");
    let container = manifests.container();
    let port = |name: &str| {
        let ports = container["ports"].as_array().expect("ports");
        let port = ports.iter().find(|port| port["name"] == name).unwrap_or_else(|| panic!("no port {name}"));
        port["containerPort"].as_u64().expect("a number")
    };
    assert_eq!(config["listen"][0].as_str(), Some(&*format!("0.0.0.0:{}", port("redis"))));
    assert_eq!(config["admin"]["listen"].as_str(), Some(&*format!("0.0.0.0:{}", port("admin"))));
    assert_eq!(manifests.of_kind("Service")["spec"]["ports"][0]["targetPort"], "redis");
    for (probe, path) in [("readinessProbe", "/readyz"), ("livenessProbe", "/healthz")] {
        let request = &container[probe]["httpGet"];
        assert_eq!((text(&request["path"]), text(&request["port"])), (path, "admin"));
    }

    let seconds = |value: &Value| value.as_u64().unwrap_or_else(|| panic!("no seconds: {value}"));
    let drain = config["shutdown-timeout"].as_str().and_then(|text| text.strip_suffix('s')).expect("seconds");
    let drain: u64 = drain.parse().expect("a number");
    let before = seconds(&container["lifecycle"]["preStop"]["sleep"]["seconds"]);
    assert!(seconds(&manifests.pod()["spec"]["terminationGracePeriodSeconds"]) > before + drain);

    // Files of the volume are where the arguments and the configuration name them.
    let sources = &manifests.pod()["spec"]["volumes"][0]["projected"]["sources"];
    assert_eq!(sources[0]["configMap"]["name"], manifests.of_kind("ConfigMap")["metadata"]["name"]);
    let mounted = text(&container["volumeMounts"][0]["mountPath"]);
    assert_eq!(container["args"], serde_json::json!(["serve", "-c", format!("{mounted}/switchyard.toml")]));
}

#[test]
fn invalid_manifests_for_kubernetes_are_detected() {
    let valid = std::fs::read_to_string(file("contrib/kubernetes/deployment.yaml")).expect("the manifest");
    for (part, with) in [("readinessProbe:", "readyProbe:"), ("replicas: 2", "replicas: two")] {
        let dir = tempfile::tempdir().expect("a folder");
        assert!(valid.contains(part));
        std::fs::write(dir.path().join("deployment.yaml"), valid.replace(part, with)).expect("written");
        let Some(checked) = check(dir.path()) else { return };
        assert!(!checked.status.success(), "{with} is accepted");
    }
}

#[test]
fn check_config_accepts_the_configuration_for_kubernetes() {
    let Some(manifests) = Manifests::read() else { return };
    let dir = manifests.mount(manifests.config());
    let checked = Command::new(env!("CARGO_BIN_EXE_switchyard"))
        .args(["check-config", "-c"])
        .arg(dir.path().join("switchyard.toml"))
        .env_remove("RUST_LOG")
        // As in the image.
        .env("STATE_DIRECTORY", "/var/lib/switchyard")
        .output()
        .expect("the binary runs");
    let (out, err) = (String::from_utf8_lossy(&checked.stdout), String::from_utf8_lossy(&checked.stderr));
    assert!(checked.status.success() && err.is_empty(), "{err}");
    assert!(out.contains("cluster = [\"valkey-0.valkey:6379\", \"valkey-1.valkey:6379\"]"), "{out}");
}

#[test]
fn probes_of_kubernetes_need_no_token_and_no_host_name() {
    if direct() {
        return;
    }
    let Some(manifests) = Manifests::read() else { return };
    let members = Members::start(3);
    // The members of the test have no password.
    let config = manifests.config().replace("password-file = \"cluster-password\"\n", "");
    let dir = manifests.mount(&config);
    let file = dir.path().join("switchyard.toml").display().to_string();
    let options = RouterOptions {
        is_cluster: true,
        password: Some("a-secret-of-a-test".to_owned()),
        ..RouterOptions::args(&["-c", &file])
    };
    let router = Router::start(&members.addresses()[..1], &options);
    let mut client = Client::connect(router.address());
    assert_eq!(client.cmd("AUTH a-secret-of-a-test"), ok());
    assert_eq!(client.cmd("MSET a 1 b 2 c 3"), ok());
    for probe in ["readinessProbe", "livenessProbe"] {
        let path = text(&manifests.container()[probe]["httpGet"]["path"]);
        let answer = probe_by_kubelet(router.admin(), path);
        assert!(answer.starts_with("HTTP/1.1 200 "), "{path}: {answer}");
    }
    let answer = probe_by_kubelet(router.admin(), "/metrics");
    assert!(answer.starts_with("HTTP/1.1 401 "), "{answer}");
}

/// Sends a request as the kubelet does: with the address of the pod as host, which the admin port accepts as it accepts
/// every IP address.
fn probe_by_kubelet(admin: SocketAddr, path: &str) -> String {
    let mut stream = TcpStream::connect(admin).expect("a connection");
    stream.set_read_timeout(Some(Duration::from_secs(20))).expect("a timeout");
    let request = format!(
        "GET {path} HTTP/1.1\r\nHost: 10.244.1.7:{}\r\nUser-Agent: kube-probe/1.30\r\nAccept: */*\r\nConnection: close\r\n\r\n",
        admin.port()
    );
    stream.write_all(request.as_bytes()).expect("sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    answer
}
