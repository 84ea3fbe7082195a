//! `amqps://`: whose certificate is trusted, and our own where the broker asks for one.

use std::fs;
use std::path::Path;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};

use super::plumbing::answers;
use crate::support::rabbit::{Conf, Rabbit};
use crate::support::sconce::{Sconce, Settings};

/// Writes an authority, and a certificate and key of each of `names`, as PEM files.
pub(crate) fn certificates(folder: &Path, names: &[&str]) {
    let write = |name: &str, pem: String| fs::write(folder.join(name), pem).expect("a file");
    let mut authority = CertificateParams::new(Vec::new()).expect("an authority");
    authority.distinguished_name.push(DnType::CommonName, "the authority");
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(authority, KeyPair::generate().expect("a key"));
    let authority = authority.expect("an authority");
    write("ca.pem", authority.pem());
    for name in names {
        let key = KeyPair::generate().expect("a key");
        let mut certificate = CertificateParams::new(vec!["localhost".to_owned()]).expect("a certificate");
        // Erlang takes a certificate whose issuer has its own name for a self-signed one.
        certificate.distinguished_name.push(DnType::CommonName, *name);
        let certificate = certificate.signed_by(&key, &authority).expect("a certificate");
        write(&format!("{name}.pem"), certificate.pem());
        write(&format!("{name}.key"), key.serialize_pem());
    }
}

fn node(folder: &Path) -> Conf {
    let file = |name: &str| folder.join(name).display().to_string();
    Conf::default()
        .tls()
        .line("ssl_options.cacertfile", file("ca.pem"))
        .line("ssl_options.certfile", file("broker.pem"))
        .line("ssl_options.keyfile", file("broker.key"))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_is_trusted_by_the_authority_in_ca_file_and_not_without_it() {
    let folder = tempfile::tempdir().expect("a folder");
    certificates(folder.path(), &["broker"]);
    let rabbit = Rabbit::private_with(node(folder.path()).line("ssl_options.verify", "verify_none"));
    let settings = Settings::echo(rabbit.tls_url());
    let trusting = settings.clone().set("broker.tls.ca_file", folder.path().join("ca.pem").display());
    answers(Sconce::launched(&trusting).await, &rabbit, &trusting).await;
    let mut wary = Sconce::launch(&settings);
    assert_eq!(wary.exit_code().await, 78, "{}", wary.log());
    assert!(wary.log().contains("certificate") && wary.log().contains("ca_file"), "{}", wary.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_that_asks_for_our_certificate_gets_it() {
    let folder = tempfile::tempdir().expect("a folder");
    certificates(folder.path(), &["broker", "worker"]);
    let conf = node(folder.path())
        .line("ssl_options.verify", "verify_peer")
        .line("ssl_options.fail_if_no_peer_cert", true);
    let rabbit = Rabbit::private_with(conf);
    let file = |name: &str| folder.path().join(name).display().to_string();
    let anonymous = Settings::echo(rabbit.tls_url()).set("broker.tls.ca_file", file("ca.pem"));
    let known = anonymous
        .clone()
        .set("broker.tls.cert_file", file("worker.pem"))
        .set("broker.tls.key_file", file("worker.key"));
    answers(Sconce::launched(&known).await, &rabbit, &known).await;
    let mut refused = Sconce::run(&anonymous.set("broker.give_up_after", "1s"), &["worker"]);
    assert_ne!(refused.exit_code().await, 0);
    assert_eq!(refused.logged("consuming"), 0, "{}", refused.log());
}
